"""Views: what is drawn, what is shared, what is applied, against the recipe."""

import dataclasses
import pathlib
import random
import sys

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from amdim_tf import config as config_lib
from amdim_tf import image_ops, policies, views
from amdim_tf.policy_tables import OPERATIONS, Policy, Step

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "tools"))
import pillow_views

BATCH = 4000
CIFAR = config_lib.make({"dataset": "cifar10"}).views
STL = config_lib.make({"dataset": "stl10"}).views


def _images(count, height, width, seed=0):
    rng = np.random.default_rng(seed)
    return tf.constant(rng.integers(0, 256, [count, height, width, 3]), tf.uint8)


def _two_views(config, images, size, seed=0, step=0, rows=slice(None), batch=None):
    draws = views.draw_batch(config, seed, step, rows, batch or len(images))
    return views.two_views(config, images, size, draws)


def _frequency_is(values, probability):
    """Pearson's chi-square of two outcomes, at the 0.1% level."""
    count = len(values)
    observed = np.sum(np.asarray(values))
    spread = count * probability * (1 - probability)
    return (observed - count * probability) ** 2 / spread < 10.83


def _is_uniform(values, low, high):
    """Kolmogorov and Smirnov's distance from a uniform distribution, at the 0.1% level."""
    ranked = (np.sort(values) - low) / (high - low)
    count = len(ranked)
    distance = np.abs(ranked - (np.arange(count) + 0.5) / count).max() + 0.5 / count
    return distance < 1.95 / np.sqrt(count)


def _same_distribution(one, other):
    """Kolmogorov and Smirnov's distance of two samples of one length, at the 0.1% level."""
    points = np.sort(np.concatenate([one, other]))
    ranks = [np.searchsorted(np.sort(sample), points, "right") for sample in (one, other)]
    return np.abs(ranks[0] - ranks[1]).max() / len(one) < 1.95 * np.sqrt(2 / len(one))


def test_frequencies_follow_the_recipe():
    drawn = views.draw_view(CIFAR, 0, 5, 1, BATCH)
    jittered = np.any(drawn.factors != 1, axis=1)
    assert _frequency_is(jittered, 0.8)
    assert _frequency_is(drawn.grayscale, 0.25)
    assert _frequency_is(views.draw_flip(CIFAR, 0, 5, BATCH), 0.5)
    # A shift is within ±4 in each direction; one in 81 of the shifts drawn is (0, 0).
    assert np.abs(drawn.shift).max() == 4
    assert _frequency_is(np.any(drawn.shift != 0, axis=1), 0.8 * 80 / 81)


def test_jitter_is_uniform_within_its_strength():
    drawn = views.draw_view(CIFAR, 1, 0, 2, BATCH)
    jittered = np.any(drawn.factors != 1, axis=1)
    changes = np.column_stack([drawn.factors - 1, drawn.hue])[jittered]
    for values, strength in zip(changes.T, CIFAR.jitter, strict=True):
        assert np.abs(values).max() <= strength
        assert _is_uniform(values, -strength, strength)
    _, counts = np.unique(drawn.order.numpy(), axis=0, return_counts=True)
    assert len(counts) == 24
    expected = BATCH / 24
    assert np.sum((counts - expected) ** 2 / expected) < 49.7  # 23 degrees of freedom, 0.1%


def test_crops_that_always_fit_are_uniform():
    config = dataclasses.replace(STL, crop_scale=(0.1, 0.5))
    boxes = views.crop_boxes(config, views.draw_view(config, 2, 0, 1, BATCH).crop, 1000, 1000)
    top, left, height, width = boxes.numpy().T
    assert _is_uniform(height * width / 1000**2, 0.1, 0.5)
    assert _is_uniform(np.log(width / height), *np.log(config.crop_ratio))
    for start, length in ((top, height), (left, width)):
        assert _is_uniform((start + 0.5) / (1001 - length), 0, 1)


def _reference_crop(rng, config, height, width):
    """Area and ratio of a crop by torchvision's rule, in plain Python."""
    for _ in range(10):
        area = height * width * rng.uniform(*config.crop_scale)
        ratio = np.exp(rng.uniform(*np.log(config.crop_ratio)))
        w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if w <= width and h <= height:
            return h * w / (height * width), w / h
    raise AssertionError("no crop fits")


def test_crops_follow_the_reference():
    """With the real recipe large crops are drawn less often: they may not fit."""
    drawn = views.draw_view(STL, 2, 0, 1, BATCH)
    top, left, height, width = views.crop_boxes(STL, drawn.crop, 375, 500).numpy().T
    assert (top >= 0).all() and (left >= 0).all()
    assert (top + height <= 375).all() and (left + width <= 500).all()
    rng = np.random.default_rng(0)
    areas, ratios = np.transpose([_reference_crop(rng, STL, 375, 500) for _ in range(BATCH)])
    assert _same_distribution(height * width / (375 * 500), areas)
    assert _same_distribution(width / height, ratios)


def test_crop_that_cannot_fit_is_centred():
    # In a 10×100 image no crop of ratio 1 can have 90% of the area: the centre is taken instead.
    config = dataclasses.replace(STL, crop_scale=(0.9, 1.0), crop_ratio=(1.0, 1.0))
    uniform = tf.random.stateless_uniform([3, 10, 4], seed=[0, 0])
    boxes = views.crop_boxes(config, uniform, 10, 100)
    np.testing.assert_array_equal(boxes, [[0, 45, 10, 10]] * 3)


def test_the_two_views_share_the_flip_and_nothing_else():
    first, second = (views.draw_view(STL, 0, 0, view, BATCH) for view in (1, 2))
    for name in first._fields[:-1]:
        a, b = np.ravel(getattr(first, name)), np.ravel(getattr(second, name))
        if a.std() and b.std():
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.08, name
    # With every other change off, both views are the flipped image.
    config = dataclasses.replace(STL, crop_scale=(0.0, 0.0), jitter=(0.0,) * 4, grayscale=0.0)
    config = dataclasses.replace(config, evaluation_resize=16)
    images = _images(64, 16, 16)
    view1, view2 = _two_views(config, images, 16)
    np.testing.assert_array_equal(view1, view2)
    flip = views.draw_flip(config, 0, 0, 64).numpy()
    expected = np.where(flip[:, None, None, None], images[:, :, ::-1], images)
    np.testing.assert_allclose(views.denormalize(config, view1), expected)
    assert 0 < flip.sum() < 64


def test_draws_depend_on_seed_step_and_view():
    reference = views.draw_view(CIFAR, 0, 0, 1, 8).factors.numpy()
    np.testing.assert_array_equal(reference, views.draw_view(CIFAR, 0, 0, 1, 8).factors)
    for seed, step, view in ((1, 0, 1), (0, 1, 1), (0, 0, 2)):
        assert np.any(reference != views.draw_view(CIFAR, seed, step, view, 8).factors)


@pytest.mark.parametrize("config, side, size", [(CIFAR, 32, 32), (STL, 96, 64)])
def test_rows_are_the_same_in_parts(config, side, size):
    images = _images(6, side, side)
    whole = _two_views(config, images, size, 3, 7)
    for rows in (slice(0, 3), slice(3, 6)):
        part = _two_views(config, images[rows], size, 3, 7, rows, 6)
        for one, all_of in zip(part, whole, strict=True):
            np.testing.assert_allclose(one, all_of[rows], atol=1e-4)


def test_no_augmentation_gives_identical_evaluation_views():
    config = config_lib.make({"dataset": "stl10", "augmentation": "none"}).views
    images = _images(3, 96, 96)
    view1, view2 = _two_views(config, images, 64)
    np.testing.assert_array_equal(view1, view2)
    np.testing.assert_array_equal(view1, views.evaluation_view(config, images, 64))


def test_evaluation_view_is_the_normalized_centre():
    images = _images(2, 64, 96)
    config = dataclasses.replace(STL, evaluation_resize=64)
    view = views.evaluation_view(config, images, 64)
    expected = (images[:, :, 16:80].numpy() - np.array(config.mean)) / np.array(config.std)
    np.testing.assert_allclose(view, expected, atol=1e-5)
    np.testing.assert_array_equal(views.denormalize(config, view), images[:, :, 16:80])


def test_grayscale_and_lighting_are_applied():
    config = dataclasses.replace(CIFAR, grayscale=1.0, lighting=0.1, translate=0, flip=0.0)
    view, _ = _two_views(config, _images(4, 32, 32), 32)
    pixels = view * tf.constant(config.std) + tf.constant(config.mean)
    assert np.ptp(pixels, axis=-1).max() < 1e-3
    still = dataclasses.replace(config, grayscale=0.0, jitter=(0.0,) * 4)
    images = _images(4, 32, 32)
    lit, _ = _two_views(still, images, 32)
    change = views.denormalize(still, lit).numpy().astype(int) - images.numpy()
    assert 0 < np.abs(change).max() <= 60


def test_policy_is_applied_to_each_view_by_itself():
    config = dataclasses.replace(CIFAR, jitter=(0.0,) * 4, grayscale=0.0, translate=0, flip=0.0)
    invert = policies.Policy(((policies.Step("invert", 0.5, 0.0),),))
    images = _images(400, 32, 32)
    draws = views.draw_batch(config, 0, 0, slice(None), 400, invert)
    inverted = []
    for view in views.two_views(config, images, 32, draws):
        pixels = views.denormalize(config, view).numpy()
        same = np.all(pixels == images, axis=(1, 2, 3))
        other = np.all(pixels == 255 - images.numpy(), axis=(1, 2, 3))
        assert np.all(same ^ other)
        inverted.append(other)
    assert all(_frequency_is(view, 0.5) for view in inverted)
    assert _frequency_is(inverted[0] == inverted[1], 0.5)
    # Rows are the same in parts.
    part = views.draw_batch(config, 0, 0, slice(100, 200), 400, invert)
    view = views.denormalize(config, views.two_views(config, images[100:200], 32, part)[0])
    np.testing.assert_array_equal(
        np.all(view != images[100:200], axis=(1, 2, 3)), inverted[0][100:200]
    )


def _policy(*operations, picks=1):
    return Policy(tuple((Step(name, 1.0, 0.9),) for name in operations), picks)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_pillows_views_do_every_operation(operation):
    """The yardstick of the input benchmark does the same work."""
    config = config_lib.make({"dataset": "cifar10", "augmentation": "strong"})
    pixels = _images(1, 32, 32)[0].numpy()
    both = pillow_views.two_views(pixels, config, _policy(operation), random.Random(0))
    assert [view.shape for view in both] == [(32, 32, 3)] * 2


def test_pillows_policy_picks_as_many_sub_policies_as_ours():
    image = Image.fromarray(_images(1, 32, 32)[0].numpy())
    for picks in (1, 2, 3):
        made = pillow_views._apply_policy(image, _policy("invert", picks=picks), random.Random(0))
        expected = np.asarray(image) if picks == 2 else 255 - np.asarray(image)
        np.testing.assert_array_equal(np.asarray(made), expected)


def test_pillows_lighting_and_cutout_are_ours():
    pixels = _images(1, 32, 32)
    image, alphas = Image.fromarray(pixels[0].numpy()), [0.3, -0.2, 0.4]
    ours = image_ops.pca_lighting(tf.cast(pixels, tf.float32), tf.constant([alphas]))[0]
    assert np.abs(ours - np.asarray(pillow_views._light(image, alphas))).max() <= 1
    config = config_lib.make(
        {"augmentation": "strong", "policy": "", "grayscale": 0.0, "flip": 0.0}
    )
    plain = dataclasses.replace(config, views=dataclasses.replace(config.views, lighting=0.0))
    lit, unlit = (
        pillow_views.two_views(pixels[0].numpy(), each, None, random.Random(0))[0]
        for each in (config, plain)
    )
    assert np.abs(lit - unlit).mean() > 0.01
    grey = np.asarray(pillow_views._cutout(Image.new("RGB", (20, 30)), 0.2, random.Random(0)))
    assert set(np.unique(grey)) == {0, 128} and 6 <= (grey[..., 0] == 128).sum() <= 16
