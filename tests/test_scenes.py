"""The procedural scenes: reproducible, balanced, and with a class that only the shape tells."""

import numpy as np
import pytest

from amdim_tf import scenes

CLASSES = len(scenes.CLASS_NAMES)
MASK = 2**64 - 1


@pytest.fixture(scope="module")
def train():
    return scenes.render("train", range(4000), 32)


@pytest.fixture(scope="module")
def held_out():
    return scenes.render("test", range(1000), 32)


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def ridge_accuracy(train_inputs, train_labels, test_inputs, test_labels):
    """Test accuracy of one-against-rest least squares with a mild penalty."""
    mean, scale = train_inputs.mean(0), train_inputs.std(0) + 1e-6
    train_inputs, test_inputs = (train_inputs - mean) / scale, (test_inputs - mean) / scale
    targets = np.eye(CLASSES, dtype=np.float32)[train_labels] - 1 / CLASSES
    gram = train_inputs.T @ train_inputs
    gram[np.diag_indices_from(gram)] += 0.1 * len(train_inputs)
    weights = np.linalg.solve(gram, train_inputs.T @ targets)
    return np.mean(np.argmax(test_inputs @ weights, axis=1) == test_labels)


def chi_square(counts):
    expected = counts.sum() / len(counts)
    return ((counts - expected) ** 2 / expected).sum()


def centroids(masks):
    """Mean (x, y) of each mask in unit coordinates: [N, 2]."""
    middles = (np.arange(masks.shape[1]) + 0.5) / masks.shape[1]
    area = masks.sum((1, 2))
    return np.stack([masks.sum(1) @ middles / area, masks.sum(2) @ middles / area], axis=1)


def assert_same_mean_in_every_class(values, labels):
    """No class mean of values [N, K] is farther from the mean than chance allows."""
    spread = values.std(0)
    for label in range(CLASSES):
        chosen = values[labels == label]
        error = np.abs(chosen.mean(0) - values.mean(0)) / (spread / len(chosen) ** 0.5)
        assert np.all(error < 4), (scenes.CLASS_NAMES[label], error)


def test_types_and_shapes():
    rendered = scenes.render("train", [5, 2, 9], 24)
    assert isinstance(rendered, scenes.Scenes)
    assert rendered.images.shape == (3, 24, 24, 3) and rendered.images.dtype == np.uint8
    assert rendered.labels.shape == (3,) and rendered.labels.dtype == np.int32
    assert rendered.masks.shape == (3, 24, 24) and rendered.masks.dtype == bool
    assert len(set(scenes.CLASS_NAMES)) == 10


def test_no_indices_render_no_scenes():
    assert scenes.render("train", [], 32).images.shape == (0, 32, 32, 3)


def test_same_arguments_same_scenes():
    assert_same(scenes.render("test", range(40), 32), scenes.render("test", range(40), 32))


def test_numpy_random_state_is_neither_used_nor_changed():
    np.random.seed(1)
    first = scenes.render("train", range(5), 32)
    state = np.random.random()
    np.random.seed(2)
    second = scenes.render("train", range(5), 32)
    assert_same(first, second)
    np.random.seed(1)
    assert np.random.random() == state


@pytest.mark.parametrize("image_size", [16, 33, 128])
def test_a_scene_does_not_depend_on_its_batch(image_size):
    # At 128 pixels the forty scenes span several chunks.
    together = scenes.render("train", range(40), image_size)
    order = np.random.default_rng(0).integers(0, 40, 23)  # shuffled, with repeats
    mixed = scenes.render("train", order, image_size)
    assert_same(mixed, [part[order] for part in together])
    for index in (0, 17, 39):
        alone = scenes.render("train", [index], image_size)
        assert_same(alone, [part[index : index + 1] for part in together])


def test_labels_and_masks_of_the_first_scenes():
    # Checked by eye: square, star, disc, square, disc, disc, ring, crescent; and for the test
    # split heart, ell, disc, square, plus, triangle, heart, crescent.
    expected = {
        "train": ([1, 3, 0, 1, 0, 0, 5, 6], [696, 639, 864, 641, 603, 855, 726, 754]),
        "test": ([7, 9, 0, 1, 4, 2, 7, 6], [658, 626, 823, 582, 770, 641, 756, 583]),
    }
    for split, (labels, areas) in expected.items():
        rendered = scenes.render(split, range(8), 64)
        assert rendered.labels.tolist() == labels
        np.testing.assert_allclose(rendered.masks.sum((1, 2)), areas, atol=2)


def test_labels_follow_the_published_hash():
    """The label is the first draw of a splitmix64 stream, recomputed here in plain integers."""

    def scramble(number):
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
        number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
        return number ^ number >> 31

    golden, indices = 0x9E3779B97F4A7C15, [0, 1, 77, 3999]
    stream = scramble(scramble(golden) + 1 & MASK)  # 1: the second split, "test"
    keys = [scramble(stream + index * golden & MASK) for index in indices]
    expected = [(scramble(key + golden & MASK) >> 40) * 10 >> 24 for key in keys]
    assert scenes.render("test", indices, 16).labels.tolist() == expected


def test_splits_share_no_scene(train, held_out):
    images = np.concatenate([train.images, held_out.images])
    assert len({image.tobytes() for image in images}) == len(images)


def test_labels_are_uniform():
    labels = scenes.render("train", range(20000), 16).labels
    counts = np.bincount(labels, minlength=CLASSES)
    assert chi_square(counts) < 27.9  # the 0.1% tail for nine degrees of freedom
    pairs = np.bincount(labels[:-1] * CLASSES + labels[1:], minlength=CLASSES**2)
    assert chi_square(pairs) < 148.2  # the 0.1% tail for ninety-nine


def test_raw_pixels_do_not_tell_the_class(train, held_out):
    train_pixels, test_pixels = (
        part.images.reshape(len(part.images), -1).astype(np.float32) / 255
        for part in (train, held_out)
    )
    accuracy = ridge_accuracy(train_pixels, train.labels, test_pixels, held_out.labels)
    assert accuracy < 0.25
    means = np.stack([train_pixels[train.labels == label].mean(0) for label in range(CLASSES)])
    gaps = (means**2).sum(1) - 2 * test_pixels @ means.T
    assert np.mean(np.argmin(gaps, axis=1) == held_out.labels) < 0.25


def test_colour_place_and_area_do_not_tell_the_class(train, held_out):
    def describe(part):
        inside = part.masks[..., None]
        colour = (part.images * inside).sum((1, 2)) / inside.sum((1, 2)) / 255
        area = part.masks.mean((1, 2))[:, None]
        features = [colour, part.images.mean((1, 2)) / 255, centroids(part.masks), area]
        return np.concatenate(features, axis=1)

    described = describe(train)
    assert_same_mean_in_every_class(described, train.labels)
    accuracy = ridge_accuracy(described, train.labels, describe(held_out), held_out.labels)
    assert accuracy < 0.15


def test_rotation_is_uniform(train):
    # The direction of a bar's long axis, from the second moments of its mask.
    masks = train.masks[train.labels == scenes.CLASS_NAMES.index("bar")]
    middles = (np.arange(32) + 0.5) / 32
    x, y = (middles[None, :] - c[:, None] for c in centroids(masks).T)  # [N, 32] each
    xx, yy = ((masks.sum(axis) * square).sum(1) for axis, square in ((1, x**2), (2, y**2)))
    xy = np.einsum("nyx,ny,nx->n", masks, y, x)
    angles = np.arctan2(2 * xy, xx - yy)  # twice the axis' angle: uniform over the circle
    counts, _ = np.histogram(angles, bins=8, range=(-np.pi, np.pi))
    assert chi_square(counts) < 24.3  # the 0.1% tail for seven degrees of freedom


def test_objects_are_whole_and_of_about_equal_area():
    rendered = scenes.render("test", range(300), 128)
    areas = rendered.masks.mean((1, 2))
    # An object cut by the image's edge would fall short of the smallest area.
    assert areas.min() > 0.37**2 * 0.97 and areas.max() < 0.46**2 * 1.03
    for label in range(CLASSES):
        assert areas[rendered.labels == label].mean() == pytest.approx(areas.mean(), rel=0.05)


def test_objects_stand_out_from_their_surroundings(train):
    inside = train.masks[..., None]
    images = train.images / 255
    object_colour = (images * inside).sum((1, 2)) / inside.sum((1, 2))
    ground_colour = (images * ~inside).sum((1, 2)) / (~inside).sum((1, 2))
    contrast = np.linalg.norm(object_colour - ground_colour, axis=1)
    assert contrast.min() > 0.15 and np.median(contrast) > 0.4


@pytest.mark.parametrize("image_size", [32, 64])
def test_other_sizes_show_the_same_scene(image_size):
    small = scenes.render("train", range(100), image_size)
    large = scenes.render("train", range(100), 2 * image_size)
    np.testing.assert_array_equal(small.labels, large.labels)
    quarters = (100, image_size, 2, image_size, 2)
    halved = large.images.reshape(*quarters, 3).mean((2, 4))
    assert np.abs(halved - small.images).mean() < 4
    covered = large.masks.reshape(quarters).mean((2, 4)) > 0.5
    overlap = (covered & small.masks).sum((1, 2)) / (covered | small.masks).sum((1, 2))
    assert overlap.min() > 0.8 and overlap.mean() > 0.92


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("validation", [0], 32), "split must be one of .*'test', 'train'.*got 'validation'"),
        (("train", [0, 20000], 32), "from 0 to 19999 for split 'train', got 20000"),
        (("test", [4000], 32), "from 0 to 3999 for split 'test', got 4000"),
        (("test", [-1], 32), "got -1"),
        (("test", [0.5], 32), "flat sequence of integers, got float64"),
        (("test", [[0]], 32), r"flat sequence of integers, got int64 of shape \(1, 1\)"),
        (("test", [0], 15), "image_size must be at least 16 .*got 15"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenes.render(*arguments)
