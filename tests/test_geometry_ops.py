"""Geometric operations against Pillow, tensorflow-addons' own output, and by property."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_image_ops import (
    BATCH,
    BATCHES,
    MODES,
    load_batch,
    pairs,
    parameters,
    pillow,
    run,
    small_batches,
    tensorflow_addons_output,
)

from amdim_tf import geometry_ops

FILL = (10, 20, 30)


def _pillow_affine(image, *coefficients):
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, fillcolor=FILL)


def _pillow_cutout(image, center_x, center_y, half_side):
    image = image.copy()
    image.paste(
        FILL,
        (center_x - half_side, center_y - half_side, center_x + half_side, center_y + half_side),
    )
    return image


def _pillow_reflect_translate(image, dx, dy):
    padded = np.pad(np.asarray(image), [(9, 9), (9, 9), (0, 0)], mode="reflect")
    return Image.fromarray(padded).crop(
        (9 - dx, 9 - dy, 9 - dx + image.width, 9 - dy + image.height)
    )


def _with_fill(operation):
    return lambda images, *values: operation(images, *values, fill=FILL)


LEVELS = parameters(-0.3, 0.3)
PIXELS = parameters(-20, 20)
# Among them the angles at which Pillow does not sample but rearranges pixels.
DEGREES = np.float32([0, 180, 30, -30, 7.7, -123.4])
WHOLE = parameters(5, 35, dtype=np.int32)

# name: the operation, its parameters, Pillow's counterpart
CASES = {
    "flip_left_right": (
        geometry_ops.flip_left_right,
        [np.arange(BATCH) % 2 == 0],
        lambda image, flip: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else image,
    ),
    "reflect_translate": (
        geometry_ops.reflect_translate,
        [parameters(-4, 5, dtype=np.int32), -parameters(-9, 9, dtype=np.int32)],
        _pillow_reflect_translate,
    ),
    "shear_x": (
        _with_fill(geometry_ops.shear_x),
        [LEVELS],
        lambda image, level: _pillow_affine(image, 1, level, 0, 0, 1, 0),
    ),
    "shear_y": (
        _with_fill(geometry_ops.shear_y),
        [LEVELS],
        lambda image, level: _pillow_affine(image, 1, 0, 0, level, 1, 0),
    ),
    "translate_x": (
        _with_fill(geometry_ops.translate_x),
        [PIXELS],
        lambda image, pixels: _pillow_affine(image, 1, 0, -pixels, 0, 1, 0),
    ),
    "translate_y": (
        _with_fill(geometry_ops.translate_y),
        [PIXELS],
        lambda image, pixels: _pillow_affine(image, 1, 0, 0, 0, 1, -pixels),
    ),
    "rotate": (
        _with_fill(geometry_ops.rotate),
        [DEGREES],
        lambda image, degrees: image.rotate(degrees, fillcolor=FILL),
    ),
    "affine": (
        _with_fill(geometry_ops.affine),
        [parameters(0.5, 1.5, (BATCH, 6))],
        lambda image, coefficients: _pillow_affine(image, *coefficients),
    ),
    "cutout": (
        _with_fill(geometry_ops.cutout),
        [WHOLE, WHOLE[::-1].copy(), parameters(0, 12, dtype=np.int32)],
        _pillow_cutout,
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", CASES)
def test_equals_pillow(name, batch, mode):
    operation, values, counterpart = CASES[name]
    images = load_batch(batch)
    result = run(operation, mode, images.astype(np.float32), *values)
    assert result.dtype == np.float32
    equal = (result == pillow(counterpart, images, *values)).mean()
    # Coefficients are float32 here and double there, so that a sample at the edge between two
    # pixels may take the other one.
    assert equal >= (0.999 if name in ("rotate", "affine") else 1.0)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_equals_its_images_one_at_a_time(name):
    operation, values, _ = CASES[name]
    images = load_batch("generated").astype(np.float32)
    one_by_one = [
        operation(images[i : i + 1], *(value[i : i + 1] for value in values)) for i in range(BATCH)
    ]
    np.testing.assert_array_equal(operation(images, *values), np.concatenate(one_by_one))


def _boxes(height, width):
    """Boxes (top, left, height, width) that shrink, enlarge, distort and touch the borders."""
    fractions = np.array(
        [
            [0, 0, 1, 1],
            [0.1, 0.2, 0.5, 0.5],
            [0.53, 0.61, 0.11, 0.13],
            [0.3, 0, 0.7, 0.31],
            [0, 0.77, 0.2, 0.23],
            [0.25, 0.25, 0.5, 0.75],
        ]
    )
    return (fractions * [height, width, height, width]).astype(np.float32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [16, 32, 101])
@pytest.mark.parametrize("batch", BATCHES)
def test_crop_and_resize_equals_pillow(batch, size, mode):
    def crop(image, box):
        top, left, height, width = box
        region = (left, top, min(left + width, image.width), min(top + height, image.height))
        return image.resize((size, size), Image.Resampling.BICUBIC, box=region)

    images = load_batch(batch)
    boxes = _boxes(*images.shape[1:3])
    result = run(
        lambda images, boxes: geometry_ops.crop_and_resize(images, boxes, size),
        mode,
        images.astype(np.float32),
        boxes,
    )
    difference = np.abs(result - pillow(crop, images, boxes))
    assert (difference <= 1).mean() > 0.999
    assert (difference == 0).mean() > 0.99  # halves may round the other way


@pytest.mark.parametrize("within_box", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_bands_of_one_image(batch, within_box):
    @tf.function
    def in_bands(image, boxes):
        limits = tf.cast(tf.shape(image), tf.float32)

        def bands(axis):
            start, length = boxes[:, axis], boxes[:, axis + 2]
            span = tf.reduce_max(geometry_ops.band_span(length, 32, 8))
            return geometry_ops.bicubic_bands(start, length, limits[axis], within_box, 32, 8, span)

        return geometry_ops.resample(image, bands(0), bands(1))

    image = load_batch(batch)[0]
    boxes = np.round(_boxes(*image.shape[:2]))
    banded = in_bands(image, boxes)
    exact = geometry_ops.crop_and_resize(image[None].astype(np.float32), boxes, 32, within_box)
    difference = np.abs(banded - exact)
    # Down first, and not rounded in between.
    assert (difference <= 1).mean() > 0.99
    assert (difference == 0).mean() > 0.75


@pytest.mark.parametrize("batch", BATCHES)
def test_crop_and_resize_does_the_evaluation_view(batch):
    """Resizing, then cutting out the centre, is one crop whose box covers what remains."""

    def evaluation_view(image):
        return image.resize((70, 70), Image.Resampling.BICUBIC).crop((3, 3, 67, 67))

    images = load_batch(batch)
    height, width = images.shape[1:3]
    box = np.float32([3 / 70 * height, 3 / 70 * width, 64 / 70 * height, 64 / 70 * width])
    result = geometry_ops.crop_and_resize(images.astype(np.float32), np.tile(box, (BATCH, 1)), 64)
    difference = np.abs(result - pillow(evaluation_view, images))
    assert (difference <= 1).mean() > 0.999
    assert (difference == 0).mean() > 0.99


def test_crop_and_resize_of_the_whole_image_at_its_size_is_the_image():
    images = load_batch("generated")[:, :40].astype(np.float32)
    boxes = np.tile(np.float32([0, 0, 40, 40]), (BATCH, 1))
    np.testing.assert_array_equal(geometry_ops.crop_and_resize(images, boxes, 40), images)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("angle", [-0.5, 0.2])
def test_rotate_equals_tensorflow_addons(angle, interpolation):
    golden = tensorflow_addons_output()
    images = golden["images"].astype(np.float32)
    degrees = np.full(len(images), np.degrees(angle), np.float32)
    result = geometry_ops.rotate(images, degrees, interpolation=interpolation)
    expected = golden[f"rotate/angle={angle}/interpolation={interpolation}"]
    difference = np.abs(result - expected.astype(np.float32))
    assert (difference <= 1).mean() > 0.99
    assert interpolation == "nearest" or difference.max() < 1.1


@pytest.mark.parametrize("axis", ["x", "y"])
@pytest.mark.parametrize("level", [-0.3, 0.1])
def test_shear_equals_tensorflow_addons(level, axis):
    golden = tensorflow_addons_output()
    images = golden["images"].astype(np.float32)
    offset = -level / 2  # its origin is the centre of the first pixel
    row = [1, level, offset, 0, 1, 0] if axis == "x" else [1, 0, 0, level, 1, offset]
    result = geometry_ops.affine(images, np.tile(np.float32(row), (len(images), 1)))
    equal = (result == golden[f"shear_{axis}/level={level}"]).numpy()
    equal = equal if axis == "x" else equal.swapaxes(1, 2)
    # At -0.3, every tenth row (column) falls exactly between two pixels: either one is right.
    between = np.isclose(level * np.arange(equal.shape[1]) % 1, 0.5)
    assert equal[:, ~between].all()


@pytest.mark.parametrize(("dx", "dy"), [(5, 0), (0, -7), (3, 2)])
def test_translate_equals_tensorflow_addons(dx, dy):
    golden = tensorflow_addons_output()
    images = golden["images"].astype(np.float32)
    moved = geometry_ops.translate_x(images, np.full(len(images), dx))
    moved = geometry_ops.translate_y(moved, np.full(len(images), dy))
    np.testing.assert_array_equal(moved, golden[f"translate/dx={dx}/dy={dy}"])


@pytest.mark.parametrize("batch", BATCHES)
def test_bilinear_rotation_equals_pillow_inside(batch):
    images = load_batch(batch)
    result = geometry_ops.rotate(images.astype(np.float32), DEGREES, interpolation="bilinear")
    expected = pillow(lambda image, d: image.rotate(d, Image.Resampling.BILINEAR), images, DEGREES)
    height, width = images.shape[1:3]
    y, x = np.mgrid[:height, :width]
    radius = min(height, width) / 2 - 2  # the circle that shows no border at any angle
    inside = (x - width / 2) ** 2 + (y - height / 2) ** 2 < radius**2
    assert (np.abs(result - expected)[:, inside] <= 1).mean() > 0.99


@pytest.mark.parametrize("mode", ["dataset", "xla"])
def test_bilinear_compiled_equals_eager(mode):
    images = load_batch("generated").astype(np.float32)

    def turn(images, degrees):
        return geometry_ops.rotate(images, degrees, FILL, "bilinear")

    np.testing.assert_allclose(
        run(turn, mode, images, DEGREES), run(turn, "eager", images, DEGREES), atol=0.1
    )


def test_reflection_reaches_over_more_than_one_image():
    row = np.arange(4, dtype=np.float32)
    images = np.broadcast_to(row[None, None, :, None], [3, 1, 4, 3])
    moved = geometry_ops.reflect_translate(images, np.int32([1, -3, 10]), np.int32([0, 5, 0]))
    np.testing.assert_array_equal(moved[:, 0, :, 0], [[1, 0, 1, 2], [3, 2, 1, 0], [2, 3, 2, 1]])


@settings(max_examples=25, deadline=None)
@given(small_batches(), pairs(-1, 1), st.integers(1, 9))
def test_outputs_stay_in_range(images, level, size):
    boxes = np.tile(np.float32([0.5, 1.0, 3.3, 2.2]), (2, 1))
    results = [
        geometry_ops.shear_x(images, level),
        geometry_ops.translate_y(images, 9 * level, FILL),
        geometry_ops.rotate(images, 180 * level, FILL),
        geometry_ops.rotate(images, 180 * level, FILL, "bilinear"),
        geometry_ops.cutout(images, 9 * level, level, np.abs(level), FILL),
        geometry_ops.crop_and_resize(images, boxes, size),
    ]
    for result in results:
        assert np.min(result) >= 0
        assert np.max(result) <= 255
    assert results[-1].shape == (2, size, size, 3)


@settings(max_examples=25, deadline=None)
@given(small_batches(), pairs(-9, 9))
def test_identity_parameters(images, center):
    zeros = np.zeros(2, np.float32)
    for name in ("shear_x", "shear_y", "translate_x", "translate_y", "rotate"):
        np.testing.assert_array_equal(getattr(geometry_ops, name)(images, zeros), images)
    np.testing.assert_array_equal(
        geometry_ops.rotate(images, zeros, interpolation="bilinear"), images
    )
    nowhere = np.zeros(2, np.int32)
    np.testing.assert_array_equal(geometry_ops.reflect_translate(images, nowhere, nowhere), images)
    np.testing.assert_array_equal(geometry_ops.flip_left_right(images, zeros > 0), images)
    np.testing.assert_array_equal(geometry_ops.cutout(images, center, center, zeros), images)


@settings(max_examples=25, deadline=None)
@given(small_batches())
def test_a_second_flip_or_half_turn_undoes_the_first(images):
    both, half = np.array([True, True]), np.float32([180, -180])
    flipped = geometry_ops.flip_left_right(images, both)
    np.testing.assert_array_equal(flipped, images[:, :, ::-1])
    turned = geometry_ops.rotate(images, half)
    np.testing.assert_array_equal(turned, images[:, ::-1, ::-1])


def test_bad_arguments():
    images = np.zeros([2, 4, 4, 3], np.float32)
    with pytest.raises(ValueError, match=r"'nearest' or 'bilinear'. Received: 'cubic'"):
        geometry_ops.rotate(images, np.zeros(2, np.float32), interpolation="cubic")
    with pytest.raises(ValueError, match=r"one parameter per image \[B\]"):
        geometry_ops.cutout(images, 1.0, 1.0, 1.0)
