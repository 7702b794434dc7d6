"""Colour and histogram operations against Pillow, tensorflow-addons' own output, and by property.

Also home of what test_geometry_ops.py shares: the image batches and the ways to run an operation.
"""

import colorsys
import functools
import itertools
import pathlib
import tarfile

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image, ImageEnhance, ImageOps

from amdim_tf import image_ops

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
PHOTOGRAPHS = REPOSITORY.parent / "shared" / "data" / "imagenet_samples.tar"
BATCH = 6  # images in each batch
BATCHES = ("generated", "photographs")
MODES = ("eager", "dataset", "xla")


@functools.cache
def load_batch(name):
    """A batch of whole grey levels: uint8 [BATCH, H, W, 3], H != W."""
    if name == "generated":
        return _generated_images()
    if not PHOTOGRAPHS.exists():
        pytest.skip(f"the photographs are not there: {PHOTOGRAPHS}")
    with tarfile.open(PHOTOGRAPHS) as archive:
        files = sorted(m.name for m in archive if m.isfile() and m.name.endswith(".JPEG"))
        chosen = files[:: len(files) // BATCH][:BATCH]
        images = [Image.open(archive.extractfile(file)).convert("RGB") for file in chosen]
        return np.stack([np.asarray(image.resize((120, 96))) for image in images])


def _generated_images():
    """Smooth noise, some of it low in contrast; one image is uniform, one has two levels only."""
    rng = np.random.default_rng(0)
    images = []
    for spread in (255, 255, 180, 40):
        coarse = rng.integers(0, spread + 1, [7, 6, 3], dtype=np.uint8)
        images.append(
            np.asarray(Image.fromarray(coarse).resize((40, 48), Image.Resampling.BICUBIC))
        )
    images.append(np.full([48, 40, 3], [17, 130, 255], np.uint8))
    images.append(np.where(images[0] > 128, 200, 90).astype(np.uint8))
    return np.stack(images)


def run(operation, mode, images, *parameters):
    """Apply `operation` eagerly, in tf.data with no size known but the channels, or under XLA."""
    arguments = [tf.constant(value) for value in (images, *parameters)]
    if mode == "eager":
        return operation(*arguments).numpy()
    if mode == "xla":
        return tf.function(operation, jit_compile=True)(*arguments).numpy()

    def parts():  # a whole batch and a smaller one
        yield tuple(value[:4] for value in arguments)
        yield tuple(value[4:] for value in arguments)

    specs = [tf.TensorSpec([None, *value.shape[1:]], value.dtype) for value in arguments]
    specs[0] = tf.TensorSpec([None, None, None, 3], tf.float32)
    dataset = tf.data.Dataset.from_generator(parts, output_signature=tuple(specs))
    return np.concatenate(list(dataset.map(operation).as_numpy_iterator()))


def pillow(operation, images, *parameters):
    """Apply a function of a Pillow image and its parameters to one image after the other."""
    rows = zip(images, *parameters, strict=True)
    results = [
        operation(Image.fromarray(image), *(value.tolist() for value in values))
        for image, *values in rows
    ]
    return np.stack([np.asarray(result.convert("RGB"), np.float32) for result in results])


def parameters(low, high, shape=(BATCH,), dtype=np.float32):
    """Reproducible parameters for a batch, uniform between low and high."""
    return np.random.default_rng(1).uniform(low, high, shape).astype(dtype)


FACTOR = parameters(0.1, 1.9)
ORDER = np.array(
    [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1], [3, 0, 1, 2], [1, 2, 0, 3]]
)
JITTER = (parameters(0.6, 1.4, (BATCH, 3)), parameters(-0.2, 0.2), ORDER.astype(np.int32))

# name: the operation, its parameters, Pillow's counterpart, the largest difference in grey levels
CASES = {
    "brightness": (
        image_ops.brightness,
        [FACTOR],
        lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
        1,
    ),
    "contrast": (
        image_ops.contrast,
        [FACTOR],
        lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
        1,
    ),
    "color": (
        image_ops.color,
        [FACTOR],
        lambda image, factor: ImageEnhance.Color(image).enhance(factor),
        1,
    ),
    "sharpness": (
        image_ops.sharpness,
        [FACTOR],
        lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
        1,
    ),
    "grayscale": (image_ops.grayscale, [], lambda image: image.convert("L"), 0),
    "grayscale of some": (
        image_ops.grayscale,
        [np.arange(BATCH) % 2 == 0],
        lambda image, apply: image.convert("L") if apply else image,
        0,
    ),
    "invert": (image_ops.invert, [], ImageOps.invert, 0),
    "solarize": (image_ops.solarize, [parameters(0, 256)], ImageOps.solarize, 0),
    "posterize": (image_ops.posterize, [parameters(1, 9, dtype=np.int32)], ImageOps.posterize, 0),
    # Pillow's own table is off by one where its float product falls just below a whole number.
    "autocontrast": (image_ops.autocontrast, [], ImageOps.autocontrast, 1),
    "equalize": (image_ops.equalize, [], ImageOps.equalize, 0),
}
# What Pillow has no counterpart of.
OTHER_CASES = {
    "hue": (image_ops.hue, [parameters(-0.5, 0.5)]),
    "color_jitter": (image_ops.color_jitter, JITTER),
    "pca_lighting": (image_ops.pca_lighting, [parameters(-0.3, 0.3, (BATCH, 3))]),
}
ALL_CASES = {name: case[:2] for name, case in (CASES | OTHER_CASES).items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", CASES)
def test_equals_pillow(name, batch, mode):
    operation, values, counterpart, tolerance = CASES[name]
    images = load_batch(batch)
    result = run(operation, mode, images.astype(np.float32), *values)
    assert result.dtype == np.float32
    difference = np.abs(result - pillow(counterpart, images, *values))
    assert difference.max() <= tolerance + 1e-3


@pytest.mark.parametrize("name", ["solarize", "posterize", "autocontrast", "equalize"])
def test_whole_level_operations_round_their_input(name):
    operation, values, *_ = CASES[name]
    images = load_batch("generated").astype(np.float32)
    fractions = np.random.default_rng(2).uniform(-0.49, 0.49, images.shape).astype(np.float32)
    fractional = np.clip(images + fractions, 0, 255)
    np.testing.assert_array_equal(operation(fractional, *values), operation(images, *values))


@pytest.mark.parametrize("mode", ["dataset", "xla"])
@pytest.mark.parametrize("name", OTHER_CASES)
def test_compiled_equals_eager(name, mode):
    operation, values = OTHER_CASES[name]
    images = load_batch("generated").astype(np.float32)
    np.testing.assert_allclose(
        run(operation, mode, images, *values), run(operation, "eager", images, *values), atol=1e-2
    )


@pytest.mark.parametrize("name", ALL_CASES)
def test_a_batch_equals_its_images_one_at_a_time(name):
    operation, values = ALL_CASES[name]
    images = load_batch("generated").astype(np.float32)
    one_by_one = [
        operation(images[i : i + 1], *(value[i : i + 1] for value in values)) for i in range(BATCH)
    ]
    np.testing.assert_allclose(operation(images, *values), np.concatenate(one_by_one), atol=1e-3)


@pytest.mark.parametrize("batch", BATCHES)
def test_hue_equals_tensorflow_and_colorsys(batch):
    images = load_batch(batch).astype(np.float32)
    delta = parameters(-0.5, 0.5)
    result = image_ops.hue(images, delta).numpy()
    hsv = tf.image.rgb_to_hsv(images / 255.0).numpy()
    hsv[..., 0] = (hsv[..., 0] + delta[:, None, None]) % 1.0
    np.testing.assert_allclose(result, 255.0 * tf.image.hsv_to_rgb(hsv).numpy(), atol=1e-2)
    for i in range(BATCH):
        for y, x in ((0, 0), (20, 7), (11, 35)):
            h, s, v = colorsys.rgb_to_hsv(*(images[i, y, x] / 255.0).tolist())
            expected = 255.0 * np.array(colorsys.hsv_to_rgb((h + delta[i]) % 1.0, s, v))
            np.testing.assert_allclose(result[i, y, x], expected, atol=1e-2)


@pytest.mark.parametrize("batch", BATCHES)
def test_hue_is_near_pillows_8_bit_hsv(batch):
    def turn(image, delta):  # as torchvision does on Pillow images
        h, s, v = image.convert("HSV").split()
        h = Image.fromarray(np.asarray(h) + np.uint8(round(delta * 255) % 256))
        return Image.merge("HSV", (h, s, v)).convert("RGB")

    images, delta = load_batch(batch), parameters(-0.5, 0.5)
    difference = np.abs(
        image_ops.hue(images.astype(np.float32), delta) - pillow(turn, images, delta)
    )
    assert difference.mean() < 1.5  # a step of Pillow's hue is worth up to six levels
    assert (difference <= 6).mean() > 0.99


def _jitter_one_at_a_time(images, factors, delta, order):
    """The four single operations in each image's own order."""
    results = []
    for i in range(len(images)):
        image = images[i : i + 1]
        for operation in order[i]:
            if operation == 3:
                image = image_ops.hue(image, delta[i : i + 1])
            else:
                adjust = (image_ops.brightness, image_ops.contrast, image_ops.color)[operation]
                image = adjust(image, factors[i : i + 1, operation])
        results.append(image)
    return np.concatenate(results)


@pytest.mark.parametrize("batch", BATCHES)
def test_color_jitter_equals_the_single_operations(batch):
    images = load_batch(batch).astype(np.float32)
    difference = np.abs(
        image_ops.color_jitter(images, *JITTER) - _jitter_one_at_a_time(images, *JITTER)
    )
    # The single operations round each pixel's luma, the jitter only its mean.
    assert difference.max() <= 1.0
    assert difference.mean() <= 0.2


@pytest.mark.parametrize("batch", BATCHES)
def test_color_jitter_without_hue_is_near_pillow(batch):
    def adjust(image, factors, order):
        enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        for operation in order:
            if operation < 3:
                image = enhancers[operation](image).enhance(factors[operation])
        return image

    images = load_batch(batch)
    factors, _, order = JITTER
    result = image_ops.color_jitter(images.astype(np.float32), factors, np.zeros(BATCH, "f"), order)
    difference = np.abs(result - pillow(adjust, images, factors, order))
    assert difference.max() <= 5.0  # Pillow cuts off the fraction three times
    assert difference.mean() <= 1.5


def test_every_order_of_the_jitter():
    orders = np.array(list(itertools.permutations(range(4))), np.int32)  # [24, 4]
    images = np.repeat(load_batch("generated")[:1, ::4, ::4], len(orders), 0).astype(np.float32)
    factors = np.tile(np.float32([[1.4, 0.7, 1.3]]), (len(orders), 1))
    delta = np.full(len(orders), 0.15, np.float32)
    result = image_ops.color_jitter(images, factors, delta, orders)
    expected = _jitter_one_at_a_time(images, factors, delta, orders)
    assert np.abs(result - expected).max() <= 1.0
    assert len({row.tobytes() for row in np.round(expected)}) > 12  # the order matters


def test_pca_lighting_by_hand():
    images = np.full([2, 1, 1, 3], 100, np.float32)
    result = image_ops.pca_lighting(images, np.float32([[0.1, 0, 0], [0, 0, -0.2]]))
    first = 100 + 255 * 0.1 * 0.2175 * np.array([-0.5675, -0.5808, -0.5836])
    second = 100 - 255 * 0.2 * 0.0045 * np.array([0.4009, -0.8140, 0.4203])
    np.testing.assert_allclose(result[:, 0, 0], [first, second], rtol=1e-5)


@functools.cache
def tensorflow_addons_output():
    """The golden file: uint8 images, and the uint8 output of each operation on them."""
    return dict(np.load(REPOSITORY / "tests" / "data" / "tfa_0.23_image_ops.npz"))


def test_equalize_equals_tensorflow_addons():
    golden = tensorflow_addons_output()
    result = image_ops.equalize(golden["images"].astype(np.float32))
    np.testing.assert_array_equal(result, golden["equalize"])


@pytest.mark.parametrize("factor", [0.1, 1.0, 1.9])
def test_sharpness_equals_tensorflow_addons(factor):
    golden = tensorflow_addons_output()
    images, expected = golden["images"].astype(np.float32), golden[f"sharpness/factor={factor}"]
    factors = np.full(len(images), factor, np.float32)
    difference = np.abs(image_ops.sharpness(images, factors) - expected)
    # Its smoothed image is truncated where Pillow's is rounded, which the factor amplifies.
    assert difference.max() <= 1.0 + abs(1.0 - factor)
    smooth = images.copy()
    windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), axis=(1, 2)).sum((-2, -1))
    smooth[:, 1:-1, 1:-1] = np.floor((windows + 4 * images[:, 1:-1, 1:-1]) / 13)
    truncated = np.clip(factor * images + (1 - factor) * smooth, 0, 255)
    assert (np.abs(truncated - expected) <= 1).mean() > 0.99


def small_batches():
    """Batches of two tiny images."""
    levels = st.floats(0, 255, width=32, allow_subnormal=False)  # TensorFlow flushes those to zero
    return hnp.arrays(np.float32, (2, 5, 4, 3), elements=levels)


def pairs(low, high):
    """One parameter for each of two images."""
    values = st.floats(low, high, width=32, allow_subnormal=False)
    return hnp.arrays(np.float32, (2,), elements=values)


@settings(max_examples=25, deadline=None)
@given(
    small_batches(),
    pairs(0, 2),
    st.permutations(range(4)),
)
def test_outputs_stay_in_range(images, factor, order):
    factors = np.stack([factor] * 3, axis=1)
    orders = np.int32([order, order[::-1]])
    results = [
        image_ops.brightness(images, factor),
        image_ops.contrast(images, factor),
        image_ops.color(images, factor),
        image_ops.sharpness(images, factor),
        image_ops.hue(images, factor - 1),
        image_ops.color_jitter(images, factors, factor - 1, orders),
        image_ops.pca_lighting(images, factors - 1),
        image_ops.grayscale(images),
        image_ops.invert(images),
        image_ops.solarize(images, 128 * factor),
        image_ops.posterize(images, (4 * factor).astype(np.int32)),
        image_ops.autocontrast(images),
        image_ops.equalize(images),
    ]
    for result in results:
        assert result.shape == images.shape
        assert np.min(result) >= 0
        assert np.max(result) <= 255


@settings(max_examples=25, deadline=None)
@given(small_batches(), st.permutations(range(4)))
def test_identity_parameters(images, order):
    ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
    for name in ("brightness", "contrast", "color", "sharpness"):
        np.testing.assert_array_equal(getattr(image_ops, name)(images, ones), images)
    np.testing.assert_allclose(image_ops.hue(images, zeros), images, atol=1e-3)
    jittered = image_ops.color_jitter(images, np.ones([2, 3], "f"), zeros, np.int32([order] * 2))
    np.testing.assert_allclose(jittered, images, atol=1e-3)
    np.testing.assert_array_equal(image_ops.pca_lighting(images, np.zeros([2, 3], "f")), images)
    np.testing.assert_array_equal(image_ops.grayscale(images, zeros > 0), images)
    levels = np.floor(images + 0.5)
    np.testing.assert_array_equal(image_ops.solarize(images, 256 * ones), levels)
    np.testing.assert_array_equal(image_ops.posterize(images, np.int32([8, 8])), levels)
    np.testing.assert_allclose(image_ops.invert(image_ops.invert(images)), images, atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(small_batches(), pairs(-0.5, 0.5))
def test_hue_keeps_value_and_saturation_and_can_be_undone(images, delta):
    turned = image_ops.hue(images, delta).numpy()
    np.testing.assert_array_equal(turned.max(-1), images.max(-1))
    np.testing.assert_allclose(turned.min(-1), images.min(-1), atol=1e-3)
    np.testing.assert_allclose(image_ops.hue(turned, -delta), images, atol=1e-1)


def test_one_parameter_per_image_is_required():
    images = np.zeros([2, 4, 4, 3], np.float32)
    with pytest.raises(ValueError, match=r"one parameter per image \[B\]. Received: .*\(2, 1\)"):
        image_ops.brightness(images, np.ones([2, 1], np.float32))
    with pytest.raises(ValueError, match=r"Expected images \[B, H, W, 3\]"):
        image_ops.solarize(images[0], np.ones(2, np.float32))
