"""Nearest neighbours against scikit-learn, a slow loop, and inputs made of ties."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier
from test_probing import digits

from amdim_tf import neighbours
from amdim_tf.errors import UserError
from amdim_tf.feature_splits import Features

NAMES = tuple("abcdefghij")


def _scikit_learn(train, queries, k, temperature):
    """Predictions, and which of them do not hang on the last digits of float32."""
    model = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute",
        weights=lambda distances: np.exp((1 - distances) / temperature),
    ).fit(train.values.astype(float), train.labels)  # fmt: skip
    clear = np.ones(len(queries), bool)
    if len(model.classes_) > 1:
        shares = np.sort(model.predict_proba(queries.astype(float)), axis=1)
        clear &= shares[:, -1] - shares[:, -2] > 1e-4
    if k < len(train.labels):
        distances, _ = model.kneighbors(queries.astype(float), k + 1)
        clear &= distances[:, k] - distances[:, k - 1] > 1e-6
    return model.predict(queries.astype(float)), clear


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    images=st.integers(1, 60),
    queries=st.integers(1, 20),
    dimension=st.integers(3, 40),
    classes=st.integers(1, 10),
    k=st.integers(1, 60),
    temperature=st.sampled_from([0.02, 0.07, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_scikit_learn(images, queries, dimension, classes, k, temperature, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal([images, dimension]).astype(np.float32)
    train = Features(values, rng.integers(0, classes, images))
    asked = rng.standard_normal([queries, dimension]).astype(np.float32)
    expected, clear = _scikit_learn(train, asked, min(k, images), temperature)
    actual = neighbours.classify(train, asked, classes, (k,), temperature)[k]
    np.testing.assert_array_equal(actual[clear, 0], expected[clear])


def test_equals_scikit_learn_on_digits():
    train, test = digits()
    ranked = neighbours.classify(train, test.values, 10)
    results = neighbours.evaluate(train, test, NAMES)
    assert list(results) == [1, 5, 20, 200]
    for k, result in results.items():
        expected, clear = _scikit_learn(train, test.values, k, 0.07)
        assert clear.mean() > 0.98
        np.testing.assert_array_equal(ranked[k][clear, 0], expected[clear])
        assert result["accuracy"] == (ranked[k][:, 0] == test.labels).mean() > 0.9
        assert result["top5"] >= result["accuracy"]
        assert result["neighbours"] == k


def test_size_of_blocks_changes_nothing(monkeypatch):
    train, test = digits()
    whole = neighbours.classify(train, test.values[:100], 10)
    monkeypatch.setattr(neighbours, "_TRAINING_BLOCK", 97)
    monkeypatch.setattr(neighbours, "_QUERY_BLOCK", 17)
    for k, ranked in neighbours.classify(train, test.values[:100], 10).items():
        np.testing.assert_array_equal(ranked, whole[k])


@pytest.mark.parametrize("block", [7, 32768])
def test_of_equal_images_the_first_is_nearest(block, monkeypatch):
    monkeypatch.setattr(neighbours, "_TRAINING_BLOCK", block)
    rng = np.random.default_rng(0)
    values = rng.standard_normal([40, 37]).astype(np.float32)
    # Each image five times, also longer and shorter, with labels in turn.
    copies = Features(np.tile(values, [5, 1]) * 2.0 ** (np.arange(200) % 3)[:, None],
                      np.repeat(np.arange(5), 40))  # fmt: skip
    for order in (np.arange(200), np.arange(200)[::-1]):
        shuffled = Features(copies.values[order], copies.labels[order])
        ranked = neighbours.classify(shuffled, values, 5, (1, 3))
        np.testing.assert_array_equal(ranked[1][:, 0], shuffled.labels[0])
        # Three votes of equal weight: the lowest of the three classes that come first.
        np.testing.assert_array_equal(ranked[3][:, 0], min(shuffled.labels[[0, 40, 80]]))


def _slow_classes(train, query, k, temperature):
    """The specification for one query: a loop over training images in float64."""
    votes, similarities = {}, []
    for index, (value, label) in enumerate(zip(train.values, train.labels, strict=True)):
        if label >= 0:
            cosine = value @ query / (np.linalg.norm(value) * np.linalg.norm(query))
            similarities.append((-cosine, index, label))
    for negative, _, label in sorted(similarities)[:k]:
        votes[label] = votes.get(label, 0) + np.exp(-negative / temperature)
    best = sorted(votes, key=lambda label: (-votes[label], label))[:5]
    return best + [-1] * (5 - len(best))


def test_equals_a_slow_loop_with_unlabelled_images():
    rng = np.random.default_rng(3)
    train = Features(rng.standard_normal([80, 9]), rng.integers(-1, 8, 80))
    queries = rng.standard_normal([12, 9])
    for k, ranked in neighbours.classify(train, queries, 8, (1, 4, 30), 0.3).items():
        expected = [_slow_classes(train, query, k, 0.3) for query in queries]
        np.testing.assert_array_equal(ranked, expected)


def test_more_neighbours_than_images_means_all_of_them():
    rng = np.random.default_rng(4)
    train = Features(rng.standard_normal([30, 5]), rng.integers(0, 3, 30))
    train.labels[:4] = -1
    test = Features(rng.standard_normal([20, 5]), rng.integers(0, 3, 20))
    results = neighbours.evaluate(train, test, "abc", (26, 500))
    assert [result.pop("neighbours") for result in results.values()] == [26, 26]
    assert results[26] == results[500]


def test_unlabelled_test_images_are_not_counted():
    train = Features(np.eye(3), np.arange(3))
    test = Features(np.eye(3)[[0, 1, 1, 2]], np.array([0, 1, 0, -1]))
    result = neighbours.evaluate(train, test, "abc", (1,))[1]
    assert result["accuracy"] == result["top5"] == 2 / 3


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("temperature", [1e-4, 0.07])
def test_extreme_lengths_and_temperatures(scale, temperature):
    rng = np.random.default_rng(5)
    train = Features((scale * rng.standard_normal([50, 6])).astype(np.float32), np.arange(50) % 5)
    nearest = neighbours.classify(train, train.values, 5, (1, 10), temperature)
    np.testing.assert_array_equal(nearest[1][:, 0], train.labels)
    np.testing.assert_array_equal(nearest[10][:, 0], train.labels)


def test_zero_vectors_are_equally_far_from_all():
    train = Features(np.array([[0.0, 0], [1, 0], [0, 1]]), np.array([2, 1, 0]))
    ranked = neighbours.classify(train, np.array([[0.0, 0], [1, 0.1], [-1, -1]]), 3, (1, 3))
    # To a vector of zeros all are equal and the first is nearest; to the last query it is nearest.
    np.testing.assert_array_equal(ranked[1][:, 0], [2, 1, 2])
    np.testing.assert_array_equal(ranked[3][0], [0, 1, 2])


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_other_float_types_are_converted(kind):
    train, test = digits()
    converted = [Features(part.values.astype(kind), part.labels) for part in (train, test)]
    expected = neighbours.evaluate(train, test, NAMES, (5,))
    assert neighbours.evaluate(*converted, NAMES, (5,)) == expected


def test_bad_input_is_refused():
    good = Features(np.eye(3), np.arange(3))
    with pytest.raises(UserError, match=r"k \[0, 5\]"):
        neighbours.classify(good, np.eye(3), 3, (0, 5))
    with pytest.raises(UserError, match="temperature 0"):
        neighbours.classify(good, np.eye(3), 3, (1,), 0)
    for bad, words in (
        (Features(np.full([3, 3], np.nan), np.arange(3)), "3 of 3 rows"),
        (Features(np.eye(3), np.full(3, -1)), "without a label"),
    ):
        with pytest.raises(UserError, match=f"training .*{words}"):
            neighbours.evaluate(bad, good, "abc")
        with pytest.raises(UserError, match=f"test .*{words}"):
            neighbours.evaluate(good, bad, "abc")
    with pytest.raises(UserError, match=r"c \(1 images\)"):
        neighbours.evaluate(Features(np.eye(3), np.array([0, 1, 1])), good, "abc")
