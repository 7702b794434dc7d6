"""Ridge regression on a few labels: closed forms against solving and refitting, and the draws."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from test_probing import digits

from amdim_tf import few_labels
from amdim_tf.errors import UserError
from amdim_tf.feature_splits import Features

NAMES = tuple(f"class{number}" for number in range(10))


def _normal_equations(values, targets, regularization):
    """Ridge by one solve with a column of ones that is not penalized."""
    extended = np.append(values, np.ones([len(values), 1]), axis=1)
    penalty = regularization * np.eye(extended.shape[1])
    penalty[-1, -1] = 0
    solution = np.linalg.solve(extended.T @ extended + penalty, extended.T @ targets)
    return solution[:-1], solution[-1]


ridge_problems = hypothesis.given(
    count=st.integers(2, 40),
    dimension=st.integers(1, 40),
    classes=st.integers(2, 5),
    exponent=st.integers(-3, 4),
    seed=st.integers(0, 2**32 - 1),
)


def _random(count, dimension, classes, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal([count, dimension]) * 3 + 1
    return values, np.eye(classes)[rng.integers(0, classes, count)]


@hypothesis.settings(max_examples=60, deadline=None)
@ridge_problems
def test_ridge_equals_normal_equations(count, dimension, classes, exponent, seed):
    values, targets = _random(count, dimension, classes, seed)
    actual = few_labels.Ridge(values, targets).solve(10.0**exponent)
    expected = _normal_equations(values, targets, 10.0**exponent)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@hypothesis.settings(max_examples=30, deadline=None)
@ridge_problems
def test_leaving_one_out_equals_refitting(count, dimension, classes, exponent, seed):
    count += 1
    values, targets = _random(count, dimension, classes, seed)
    predicted = np.empty_like(targets)
    for index in range(count):
        others = np.arange(count) != index
        weights, intercept = _normal_equations(values[others], targets[others], 10.0**exponent)
        predicted[index] = values[index] @ weights + intercept
    centred = targets - targets.mean(axis=0)
    predicted += centred / (count - 1) - targets.mean(axis=0)
    expected = (centred * predicted).sum() / max(np.linalg.norm(predicted), 1e-300)
    actual = few_labels.Ridge(values, targets).left_out_agreement(10.0**exponent)
    assert actual == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("count", [30, 400])
def test_classifier_equals_scikit_learn(count):
    train, test = digits()
    values, labels = train.values[:count].astype(float), train.labels[:count]
    (weights, intercept), regularization = few_labels.fit(values, labels, 10)
    theirs = Ridge(alpha=regularization * count).fit(values, np.eye(10)[labels])
    outputs = test.values @ weights + intercept
    np.testing.assert_allclose(outputs, theirs.predict(test.values), atol=1e-6)


def test_more_labels_give_more_accuracy_on_digits():
    train, test = digits()
    results = few_labels.evaluate(train, test, NAMES, draws=4)
    assert list(results) == ["1 per class", "5 per class", "10 per class", "1%", "10%"]
    means = [result["mean"] for result in results.values()]
    assert 0.4 < means[0] < means[1] < means[2] < 0.95
    assert means[4] > means[3] + 0.1
    for result in results.values():
        assert len(result["accuracies"]) == len(result["regularizations"]) == 4
        assert result["mean"] == pytest.approx(np.mean(result["accuracies"]))
        assert result["std"] == pytest.approx(np.std(result["accuracies"], ddof=1))
    assert [result["images"] for result in results.values()][:3] == [10, 50, 100]


def test_choice_is_close_to_the_best_regularization():
    train, test = digits()
    for count in (50, 400):
        values, labels = train.values[:count] / 16.0, train.labels[:count]
        (weights, intercept), _ = few_labels.fit(values.astype(float), labels, 10)
        system = few_labels.Ridge(values.astype(float), np.eye(10)[labels])

        def accuracy(weights, intercept):
            return ((test.values / 16 @ weights + intercept).argmax(axis=1) == test.labels).mean()

        by_regularization = [
            accuracy(*system.solve(count * r)) for r in few_labels._REGULARIZATIONS
        ]
        assert accuracy(weights, intercept) > max(by_regularization) - 0.03
        assert max(by_regularization) - min(by_regularization) > 0.05


def test_test_images_do_not_influence_the_choice():
    train, test = digits()
    poison = Features(np.random.default_rng(0).standard_normal(test.values.shape), test.labels)
    clean, poisoned = (
        few_labels.evaluate(train, split, NAMES, (5, 0.1), draws=3) for split in (test, poison)
    )
    for name in clean:
        assert clean[name]["regularizations"] == poisoned[name]["regularizations"]
        assert clean[name]["mean"] > poisoned[name]["mean"] + 0.3
    assert clean == few_labels.evaluate(train, test, NAMES, (5, 0.1), draws=3)
    assert clean != few_labels.evaluate(train, test, NAMES, (5, 0.1), draws=3, seed=1)


def test_one_image_per_class_has_a_fixed_regularization():
    train, test = digits()
    result = few_labels.evaluate(train, test, NAMES, (1, 0.01), draws=2)
    assert [r["regularizations"] for r in result.values()] == [[10.0, 10.0], [10.0, 10.0]]


@pytest.mark.parametrize("setting", [1, 5, 10, 0.01, 0.1, 1.0])
def test_draws_are_stratified_reproducible_and_different(setting):
    labels = np.random.default_rng(0).integers(-1, 10, 1500)
    first, again, other, seed = (
        few_labels.draw(labels, 10, setting, *numbers)
        for numbers in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    counts = np.bincount(labels[labels >= 0])
    wanted = np.full(10, setting) if isinstance(setting, int) else np.round(setting * counts)
    np.testing.assert_array_equal(np.bincount(labels[first]), np.maximum(wanted, 1))
    assert len(set(first)) == len(first)
    np.testing.assert_array_equal(first, again)
    if setting != 1.0:
        assert set(first) != set(other) and set(first) != set(seed)


def test_fewer_labels_are_among_more_labels():
    labels = np.arange(500) % 10
    few, many = (few_labels.draw(labels, 10, count, 0, 2) for count in (5, 10))
    assert set(few) < set(many)


def test_settings_that_a_class_cannot_fill_are_left_out(capsys):
    train, test = digits()
    last = np.flatnonzero(train.labels == 9)[7:]
    scarce = Features(np.delete(train.values, last, axis=0), np.delete(train.labels, last))
    results = few_labels.evaluate(scarce, test, NAMES, draws=1)
    assert list(results) == ["1 per class", "5 per class", "1%", "10%"]
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert "10 per class left out" in line and "Received: 7 of class9" in line


def test_no_draws_are_refused():
    with pytest.raises(UserError, match=r"at least 1 draw\. Received: 0"):
        few_labels.evaluate(*digits(), NAMES, draws=0)


def test_class_without_any_image_is_left_out():
    labels = np.arange(60) % 9
    assert len(few_labels.draw(labels, 10, 5, 0, 0)) == 45


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_other_float_types_and_unlabelled_images(kind):
    train, test = digits()
    expected = few_labels.evaluate(train, test, NAMES, (5,), draws=2)
    converted = Features(test.values.astype(kind), test.labels)
    train = Features(train.values.astype(kind), train.labels)
    assert few_labels.evaluate(train, converted, NAMES, (5,), draws=2) == expected
    half = Features(test.values, np.where(np.arange(len(test.labels)) < 300, test.labels, -1))
    counted = Features(test.values[:300], test.labels[:300])
    results = [few_labels.evaluate(train, s, NAMES, (5,), draws=2) for s in (half, counted)]
    assert results[0] == results[1]


def test_bad_splits_are_refused():
    train, test = digits()
    broken = Features(np.where(np.arange(64) == 3, np.nan, test.values), test.labels)
    with pytest.raises(UserError, match=r"test features: .* 597 of 597 rows"):
        few_labels.evaluate(train, broken, NAMES)
    without = Features(train.values, np.where(train.labels == 4, -1, train.labels))
    with pytest.raises(UserError, match="class4"):
        few_labels.evaluate(without, test, NAMES)
