"""The model against numbers from the authors' own code (tests/data/reference_*.npz)."""

import numpy as np
import pytest
import tensorflow as tf

from amdim_tf import winograd
from amdim_tf.nce import (
    flat_locations,
    multiscale_losses,
    nce_log_probabilities,
    scaled_scores,
    soft_clip,
)
from amdim_tf.reference_weights import from_reference_layout, reference_variables


def _check(actual, expected, tolerance=1e-4):
    np.testing.assert_allclose(np.reshape(actual, expected.shape), expected, atol=tolerance, rtol=0)


def _train_mode(golden, nudge=0):
    """Embeddings {scale: φ} of both views in training mode; a nudge moves pixels by rounding."""
    model, numbers = golden.model, golden.numbers
    images = np.concatenate([numbers["x1"], numbers["x2"]], axis=0)
    if nudge:
        signs = np.random.default_rng(nudge).choice([-1, 1], images.shape)
        images = (images * (1 + 2.0 ** (nudge // 4 - 22) * signs)).astype(np.float32)
    features = model.encoder(images, training=True, groups=2)
    embeddings = model.embed(features, (1, 5, 7), training=True, groups=2)
    halves = {scale: tf.split(value, 2) for scale, value in embeddings.items()}
    return [{scale: half[view] for scale, half in halves.items()} for view in (0, 1)]


def test_inference_embeddings(golden):
    for view in ("x1", "x2"):
        encoded = golden.model.encode(golden.numbers[view], training=False)
        for scale in (1, 5, 7):
            _check(encoded[f"phi{scale}"], golden.numbers[f"eval/{view}/r{scale}"])


def test_classifier_logits(golden):
    encoded = golden.model.encode(golden.numbers["x1"], training=False)
    logits = golden.model.classify(encoded["f1"])
    for name in ("linear", "mlp"):
        _check(logits[name], golden.numbers[f"eval/x1/logits_{name}"])


@pytest.fixture(params=[False, True])
def fewer_multiplications(request, monkeypatch):
    """Whether convolutions multiply less, of a few images and channels too."""
    monkeypatch.setattr(winograd, "_FEWEST_IMAGES", 1)
    monkeypatch.setattr(winograd, "_FEWEST_CHANNELS", 1)
    with winograd.allowed(request.param):
        yield


@pytest.mark.usefixtures("fewer_multiplications")
def test_training_embeddings(golden):
    views = _train_mode(golden)
    for name, view in zip(("x1", "x2"), views, strict=True):
        for scale in (1, 5, 7):
            _check(view[scale], golden.numbers[f"train/{name}/r{scale}"])


def test_one_view_in_training_mode(golden):
    encoded = golden.model.encode(golden.numbers["x2"], training=True)
    for scale in (1, 5, 7):
        _check(encoded[f"phi{scale}"], golden.numbers[f"train/x2/r{scale}"])


def _losses(golden, nudge=0):
    numbers, settings = golden.numbers, golden.config.model
    return multiscale_losses(
        settings.tasks,
        *_train_mode(golden, nudge),
        {5: numbers["source5/x1"]},
        {5: numbers["source5/x2"]},
        settings.score_clip,
        settings.score_regularization,
    )


def test_losses(golden):
    losses = _losses(golden)
    for task in ("1to5", "1to7", "5to5"):
        _check(losses[task].loss, golden.numbers[f"loss/{task}"])
    regularizer = sum(result.regularizer for result in losses.values())
    _check(regularizer, golden.numbers["loss/score_regularizer"])


@pytest.mark.usefixtures("fewer_multiplications")
def test_gradients(golden):
    """At the golden images, or within their rounding.

    One ReLU of reference_128 has an input of 2e-9, so that it depends on the processor's way of
    summing whether it is on, and with it 4% of a gradient. Images that differ by some units in the
    last place, at most 4e-6 of a pixel, put it on either side.
    """
    errors = {}
    for nudge in range(20):
        errors[nudge] = _largest_gradient_error(golden, nudge)
        if errors[nudge][0] < 1e-3:
            return
    raise AssertionError(errors)


def _largest_gradient_error(golden, nudge):
    """(relative error, name of the parameter)."""
    numbers = golden.numbers
    variables = {
        name: variable
        for name, variable in reference_variables(golden.model).items()
        if f"grad/{name}" in numbers
    }
    assert len(variables) == sum(key.startswith("grad/") for key in numbers)
    with tf.GradientTape() as tape:
        losses = _losses(golden, nudge)
        total = tf.add_n([result.loss + result.regularizer for result in losses.values()])
    gradients = tape.gradient(total, [variable.value for variable in variables.values()])
    largest = max(np.abs(numbers[key]).max() for key in numbers if key.startswith("grad/"))
    errors = []
    for name, gradient in zip(variables, gradients, strict=True):
        expected = from_reference_layout(numbers[f"grad/{name}"])
        if _is_removed_by_batch_norm(name, golden.config.model.use_bn):
            assert max(np.abs(gradient).max(), np.abs(expected).max()) < 1e-4 * largest, name
        else:
            difference = np.linalg.norm(gradient - expected)
            errors.append((float(difference / np.linalg.norm(expected)), name))
    return max(errors)


def _is_removed_by_batch_norm(name, use_bn):
    """Whether every path from this offset leads into a batch norm, which removes it.

    The true gradient is zero then, and what either program computes is rounding.
    """
    after_7x7 = use_bn and name == "encoder.module.layer_list.4.bn.bias"
    return name.endswith("shortcut.bias") or after_7x7


def test_nce_of_each_image_and_location(golden):
    view1, view2 = _train_mode(golden)
    scores = scaled_scores(view1[1], flat_locations(view2[7]))
    log_probabilities, positives = nce_log_probabilities(
        soft_clip(scores, golden.config.model.score_clip)
    )
    _check(log_probabilities, golden.numbers["nce/1to7/log_softmax"])
    _check(positives, golden.numbers["nce/1to7/clipped_positive_score"])
