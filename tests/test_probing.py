"""The linear and the MLP probe: against scikit-learn, on hard inputs, and without test images."""

import json

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix, top_k_accuracy_score
from threadpoolctl import threadpool_limits

from amdim_tf import config as config_lib
from amdim_tf import probing, scenes
from amdim_tf.errors import UserError
from amdim_tf.model import AMDIM
from amdim_tf.probing import Features


@pytest.fixture
def short_mlp(monkeypatch):
    """One setting and a few epochs for the MLP, where more would only take time."""
    monkeypatch.setattr(probing, "_MLP_EPOCHS", 6)
    monkeypatch.setattr(probing, "_LEARNING_RATES", (3e-3,))
    monkeypatch.setattr(probing, "_L2_WEIGHTS", (1e-5,))


def digits():
    """scikit-learn's digits in two parts."""
    values, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    values, labels = values[order].astype(np.float32), labels[order]
    return Features(values[:1200], labels[:1200]), Features(values[1200:], labels[1200:])


def _scenes():
    """Features of scenes from an untrained encoder."""
    keras.utils.set_random_seed(0)
    config = config_lib.make({"dataset": "scenes", "ndf": 32, "n_rkhs": 128, "n_depth": 1})
    model = AMDIM(config)
    splits = []
    for name, count in (("train", 3000), ("test", 1500)):
        images, labels = scenes.render(name, range(count), 32)[:2]
        splits.append(Features(model.encode(model.preprocess(images))["f1"].numpy(), labels))
    return splits


def _clusters(count, seed, spread=0.2, classes=3):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    noise = spread * rng.standard_normal([count, classes])
    return Features((np.eye(classes)[labels] + noise).astype(np.float32), labels)


def _exclusive_or(count, seed):
    """Two classes in opposite quadrants: no line separates them."""
    signs = np.random.default_rng(seed).choice([-1, 1], [count, 2])
    noise = 0.2 * np.random.default_rng(seed + 1).standard_normal([count, 2])
    return Features((signs + noise).astype(np.float32), (signs[:, 0] == signs[:, 1]).astype(int))


def _accuracy(probe, test, classes):
    return probing.measure(probe.logits(test.values), test.labels, classes)["accuracy"]


@pytest.mark.parametrize("data", [digits, _scenes])
def test_linear_probe_agrees_with_scikit_learn(data):
    train, test = data()
    probe = probing.fit_linear(train, 10)
    theirs = LogisticRegression(C=1 / probe.settings["regularization"], max_iter=3000)
    with threadpool_limits(1):  # its threads wait for each other on a busy machine
        theirs.fit((train.values - probe.mean) / probe.std, train.labels)
    expected = theirs.score((test.values - probe.mean) / probe.std, test.labels)
    assert expected > 0.15
    assert abs(_accuracy(probe, test, 10) - expected) <= 0.005


def test_settings_are_chosen_on_training_images_and_reported():
    train, _ = digits()
    settings = json.loads(json.dumps(probing.fit_linear(train, 10).settings))
    best = max(row["accuracy"] for row in settings["grid"])
    chosen = [
        row for row in settings["grid"] if row["regularization"] == settings["regularization"]
    ]
    assert chosen[0]["accuracy"] == best > settings["grid"][0]["accuracy"]
    assert settings["held_out_images"] == pytest.approx(240, abs=5)


def test_much_noise_asks_for_much_regularization():
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 2
    values = rng.standard_normal([200, 300])
    values[:, :20] += 0.5 * labels[:, None]
    assert probing.fit_linear(Features(values, labels), 2).settings["regularization"] >= 10


@pytest.mark.parametrize("fit", [probing.fit_linear, probing.fit_mlp])
def test_probes_separate_what_is_separable(fit, short_mlp):
    probe = fit(_clusters(900, 0), 3)
    assert _accuracy(probe, _clusters(400, 1), 3) > 0.99


@pytest.mark.parametrize("fit", [probing.fit_linear, probing.fit_mlp])
def test_probes_are_at_chance_on_noise(fit, short_mlp):
    rng = np.random.default_rng(1)
    train, test = (
        Features(rng.standard_normal([n, 5]), rng.integers(0, 4, n)) for n in (2000, 1000)
    )
    assert abs(_accuracy(fit(train, 4), test, 4) - 0.25) < 0.06


def test_mlp_learns_what_a_line_cannot(short_mlp):
    train, test = _exclusive_or(1000, 0), _exclusive_or(500, 2)
    assert _accuracy(probing.fit_linear(train, 2), test, 2) < 0.65
    assert _accuracy(probing.fit_mlp(train, 2), test, 2) > 0.98


def test_mlp_on_digits_beats_the_linear_probe():
    train, test = digits()
    probe = probing.fit_mlp(train, 10)
    settings = json.loads(json.dumps(probe.settings))
    assert len(settings["grid"]) == 4
    assert {"learning_rate", "l2", "accuracy", "loss"} == set(settings["grid"][0])
    assert _accuracy(probe, test, 10) > _accuracy(probing.fit_linear(train, 10), test, 10)


@pytest.mark.parametrize("fit", [probing.fit_linear, probing.fit_mlp])
def test_poisoned_test_images_leave_the_probe_bit_for_bit(fit, short_mlp):
    train, test = digits()
    poison = np.random.default_rng(0).standard_normal(test.values.shape) * 1e6
    seen = []
    for values in (test.values, poison):
        probe = fit(train, 10, seed=3)
        accuracy = probing.measure(probe.logits(values), test.labels, 10)["accuracy"]
        arrays = (
            probe.layer.get_weights() if fit is probing.fit_mlp else [probe.weights, probe.bias]
        )
        seen.append((accuracy, probe.settings, [*arrays, probe.mean, probe.std]))
    assert seen[0][0] > 0.8 > 0.3 > seen[1][0]
    assert seen[0][1] == seen[1][1]
    for first, second in zip(seen[0][2], seen[1][2], strict=True):
        np.testing.assert_array_equal(first, second)


def test_another_seed_gives_another_mlp(short_mlp):
    train, _ = digits()
    first, second = (probing.fit_mlp(train, 10, seed).layer.get_weights()[0] for seed in (0, 1))
    assert np.abs(first - second).max() > 0.01


@pytest.mark.parametrize("kind", [np.float16, np.float64])
@pytest.mark.parametrize("fit", [probing.fit_linear, probing.fit_mlp])
def test_other_float_types_are_converted(fit, kind, short_mlp):
    train, test = _clusters(600, 0), _clusters(300, 1)
    probe = fit(Features(train.values.astype(kind), train.labels.astype(np.int64)), 3)
    logits = probe.logits(test.values.astype(kind))
    assert logits.dtype == np.float32
    assert probing.measure(logits, test.labels, 3)["accuracy"] > 0.98


def test_features_of_very_different_scale_and_constant_ones():
    train, test = _clusters(900, 3), _clusters(300, 4)
    scale, shift = np.array([1e3, 1e-3, 1]), np.array([5e5, 0, -2])
    scaled = [
        Features(np.append(part.values * scale + shift, np.full([n, 1], 0.3), 1), part.labels)
        for part, n in ((train, 900), (test, 300))
    ]
    assert _accuracy(probing.fit_linear(scaled[0], 3), scaled[1], 3) > 0.99


@pytest.mark.parametrize("fit", [probing.fit_linear, probing.fit_mlp])
def test_unlabelled_images_are_left_out(fit, short_mlp):
    train, test = _clusters(600, 0), _clusters(300, 1)
    values = np.concatenate([train.values, 1e4 * train.values])
    labels = np.concatenate([train.labels, np.full(600, -1)])
    assert _accuracy(fit(Features(values, labels), 3), test, 3) > 0.98


@pytest.mark.parametrize("fit", [probing.fit_linear, probing.fit_mlp])
@pytest.mark.parametrize(
    "values, labels, words",
    [
        (np.full([6, 2], np.nan), np.arange(6) % 2, "6 of 6 rows"),
        (np.ones([6, 2]), np.full(6, -1), "6 images without a label"),
        (np.ones([2, 2]), np.arange(2), "at most 1 image per class"),
        (np.zeros([0, 2]), np.zeros(0, int), r"features \[0, 2\]"),
    ],
)
def test_bad_features_are_refused(fit, values, labels, words):
    with pytest.raises(UserError, match=words):
        fit(Features(values, labels), 2)


def test_a_handful_of_images_is_enough(short_mlp):
    train = Features(np.array([[0.0], [1], [0.1], [0.9]]), np.array([0, 1, 0, 1]))
    for fit in (probing.fit_linear, probing.fit_mlp):
        assert np.isfinite(fit(train, 2).logits(train.values)).all()


@pytest.mark.parametrize("fit", [probing.fit_linear, probing.fit_mlp])
def test_classes_without_images_are_not_predicted(fit, short_mlp):
    logits = fit(_clusters(600, 0), 7).logits(_clusters(300, 1).values)
    assert np.isfinite(logits).all()
    assert set(logits.argmax(axis=1)) == {0, 1, 2}


def test_measure_by_hand():
    logits = np.array([[3, 2, 1], [3, 2, 1], [0, 1, 5], [9, 0, 0], [1, 1, 0]], np.float32)
    labels = np.array([0, 1, 2, -1, 1])
    result = probing.measure(logits, labels, 3)
    assert result == {
        "accuracy": 0.5,
        "top5": 1.0,
        "per_class": [1.0, 0.0, 1.0],
        "confusion": [[1, 0, 0], [2, 0, 0], [0, 0, 1]],
    }
    assert probing.measure(logits[:2], labels[:2], 3)["per_class"] == [1.0, 0.0, None]


def test_measure_equals_scikit_learn():
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal([500, 12]), rng.integers(0, 12, 500).astype(np.int8)
    result = probing.measure(logits, labels, 12)
    assert result["accuracy"] == pytest.approx(top_k_accuracy_score(labels, logits, k=1))
    assert result["top5"] == pytest.approx(top_k_accuracy_score(labels, logits, k=5))
    expected = confusion_matrix(labels, logits.argmax(axis=1))
    np.testing.assert_array_equal(result["confusion"], expected)
    np.testing.assert_allclose(result["per_class"], expected.diagonal() / expected.sum(axis=1))


def test_constant_logits_have_no_undue_top_five():
    labels = np.arange(20)
    assert probing.measure(np.zeros([20, 20]), labels, 20)["top5"] == 5 / 20


def test_measure_needs_labels():
    with pytest.raises(UserError, match="expected labelled images"):
        probing.measure(np.zeros([3, 2]), np.full(3, -1), 2)
