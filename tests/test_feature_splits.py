"""Features of a split: what is refused, statistics, and the part that is held out."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from amdim_tf import feature_splits
from amdim_tf.errors import UserError
from amdim_tf.feature_splits import Features

NAMES = ("cat", "dog", "owl")


def _split(count=12, dimension=4, seed=0):
    values = np.random.default_rng(seed).standard_normal([count, dimension]).astype(np.float32)
    return Features(values, np.arange(count) % len(NAMES))


def _with(split, **changes):
    values, labels = split.values.copy(), split.labels.copy()
    for row, value in changes.get("values", {}).items():
        values[row, 1] = value
    for row, label in changes.get("labels", {}).items():
        labels[row] = label
    return Features(values, labels)


def test_good_splits_pass():
    test = _with(_split(), labels={3: -1})
    feature_splits.check(_split(), test, NAMES)
    for kind in (np.float16, np.float64):
        converted = Features(test.values.astype(kind), test.labels.astype(np.int64))
        feature_splits.check(_split(), converted, NAMES)


@pytest.mark.parametrize(
    "split, words",
    [
        (_with(_split(), values={0: np.nan, 5: np.inf, 7: -np.inf}), ("3 of 12 rows", "NaN")),
        (Features(np.full([12, 4], 1e300), _split().labels), ("12 of 12 rows",)),
        (Features(np.zeros([0, 4]), np.zeros(0, int)), ("[0, 4]",)),
        (Features(np.zeros([12, 0]), _split().labels), ("[12, 0]",)),
        (Features(np.zeros([12]), _split().labels), ("[12]",)),
        (Features(_split().values, np.arange(11) % 3), ("[12, 4]", "[11]")),
        (Features(_split().values, np.full(12, -1)), ("12 images without a label",)),
        (_with(_split(), labels={2: 3}), ("0 to 2", "0 to 3")),
        (_with(_split(), labels={2: -2}), ("-1 for none", "-2 to 2")),
    ],
)
@pytest.mark.parametrize("name", ["training", "test"])
def test_bad_splits_are_named_in_one_line(split, words, name):
    splits = {"training": _split(), "test": _split(), name: split}
    with pytest.raises(UserError) as error:
        feature_splits.check(splits["training"], splits["test"], NAMES)
    assert "\n" not in str(error.value)
    for word in (name, *words):
        assert word in str(error.value)


def test_classes_that_differ_between_splits_are_named():
    train = Features(_split().values, np.where(_split().labels == 2, 0, _split().labels))
    with pytest.raises(UserError, match=r"owl \(4 images\)"):
        feature_splits.check(train, _split(), NAMES)
    # A class that the test images lack is no obstacle.
    feature_splits.check(_split(), train, NAMES)


def test_features_of_different_width_are_refused():
    with pytest.raises(UserError, match=r"expected 4 numbers .* Received: 5"):
        feature_splits.check(_split(), _split(dimension=5), NAMES)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_standardization_over_several_blocks(kind):
    rng = np.random.default_rng(1)
    values = (rng.standard_normal([9001, 3]) * [1, 30, 0.01] + [0, 500, 2]).astype(kind)
    counted = rng.random(9001) < 0.7
    mean, std = feature_splits.standardization(values, counted)
    np.testing.assert_allclose(mean, values[counted].mean(axis=0, dtype=float), rtol=1e-6)
    np.testing.assert_allclose(std, values[counted].std(axis=0, dtype=float), rtol=1e-5)


def test_constant_features_become_zero_and_not_noise():
    values = np.tile(np.array([0.1, 0.0, 12345.67], np.float32), [10000, 1])
    mean, std = feature_splits.standardization(values, np.ones(10000, bool))
    np.testing.assert_array_equal(std, 1)
    assert np.abs((values - mean) / std).max() < 1e-3


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
    labels=st.lists(st.integers(-1, 4), min_size=1, max_size=80), seed=st.integers(0, 1000)
)
def test_rows_and_held_out_rows_of_classes(labels, seed):
    labels = np.array(labels)
    rows = feature_splits.rows_of_classes(labels, 5)
    for number, found in enumerate(rows):
        np.testing.assert_array_equal(found, np.flatnonzero(labels == number))
    counts = np.array([len(found) for found in rows])
    if counts.max() < 2 or (counts > 0).sum() < 2:
        words = "at most 1 image per class" if (counts > 0).sum() > 1 else "2 classes"
        with pytest.raises(UserError, match=words):
            feature_splits.held_out(labels, 5, seed)
        return
    mask = feature_splits.held_out(labels, 5, seed)
    assert not mask[labels == -1].any()
    held = np.bincount(labels[mask], minlength=5)
    assert (np.abs(held - 0.2 * counts) <= 0.8).all()
    assert (held[counts > 1] >= 1).all()
    assert (held[counts > 0] < counts[counts > 0]).all()
    np.testing.assert_array_equal(mask, feature_splits.held_out(labels, 5, seed))


def test_another_seed_holds_out_other_rows():
    labels = np.arange(1000) % 10
    first, second = (feature_splits.held_out(labels, 10, seed) for seed in (0, 1))
    assert first.sum() == second.sum() == 200
    assert (first & second).sum() < 80
