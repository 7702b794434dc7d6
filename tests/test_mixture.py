"""Mixtures: the closed form against the explicit objective, the layer, and a model that has one."""

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from test_model import make_batch, make_config, make_model
from test_train import TINY, refused

from amdim_tf import checkpoints, mixture, nce, training_loop
from amdim_tf import config as config_lib
from amdim_tf.mixture import Mixture
from amdim_tf.mixture_objective import mixture_figures, mixture_objective, mixture_posterior
from amdim_tf.mixture_watch import MixtureWatch

SHAPES = {
    "B": st.integers(1, 5),
    "K": st.integers(1, 6),
    "S": st.integers(1, 9),
    "temperature": st.sampled_from([1e-3, 0.1, 0.7, 1.0, 3.0, 50.0]),
    "scale": st.sampled_from([0.01, 1.0, 30.0]),
    "seed": st.integers(0, 2**32 - 1),
}


def _scores(B, K, S, scale, seed):
    return -np.abs(scale * np.random.default_rng(seed).standard_normal([B, K, S]))


def _explicit(scores, q, temperature):
    """Σ_j q_j s_j + αH(q), the paper's objective for a given q [B, K, S], place by place."""
    B, K, S = scores.shape
    total = np.zeros([B, S])
    for b, s in np.ndindex(B, S):
        for k in range(K):
            total[b, s] += q[b, k, s] * scores[b, k, s]
            if q[b, k, s] > 0:
                total[b, s] -= q[b, k, s] * np.log(q[b, k, s]) / temperature
    return total


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(**SHAPES)
def test_closed_form_equals_the_objective_with_the_best_q(B, K, S, temperature, scale, seed):
    scores = _scores(B, K, S, scale, seed)
    q = mixture_posterior(tf.constant(scores), temperature).numpy()
    closed = mixture_objective(tf.constant(scores), temperature).numpy()
    constant = np.log(K) / temperature
    expected = _explicit(scores, q, temperature)
    np.testing.assert_allclose(closed + constant, expected, rtol=1e-9, atol=1e-12 / temperature)
    # No other q does better.
    rng = np.random.default_rng(seed)
    for concentration in (0.2, 5.0):
        other = rng.dirichlet([concentration] * K, [B, S]).swapaxes(1, 2)  # [B, K, S]
        assert np.all(_explicit(scores, other, temperature) <= closed + constant + 1e-9)
    single = mixture_objective(tf.constant(scores, tf.float32), temperature)
    np.testing.assert_allclose(single, closed, rtol=1e-4, atol=1e-4)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(**SHAPES)
def test_gradient_is_that_of_the_scores_weighted_by_q(B, K, S, temperature, scale, seed):
    scores = tf.constant(_scores(B, K, S, scale, seed))
    q = mixture_posterior(scores, temperature)
    weights = tf.constant(np.random.default_rng(seed).standard_normal([B, S]))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(scores)
        closed = tf.reduce_sum(weights * mixture_objective(scores, temperature))
        given = tf.reduce_sum(weights[:, None] * tf.stop_gradient(q) * scores)
    np.testing.assert_allclose(
        tape.gradient(closed, scores), tape.gradient(given, scores), rtol=1e-7, atol=1e-12
    )


def test_limits_are_the_mean_and_the_maximum():
    scores = tf.constant(_scores(4, 5, 6, 2.0, 0))
    for temperature, limit in ((1e-6, tf.reduce_mean), (1e6, tf.reduce_max)):
        objective = mixture_objective(scores, temperature)
        np.testing.assert_allclose(objective, limit(scores, axis=1), atol=2e-5)
    between = mixture_objective(scores, 1.0)
    assert np.all(between > tf.reduce_mean(scores, axis=1))
    assert np.all(between < tf.reduce_max(scores, axis=1))


def test_by_hand():
    scores = tf.math.log([[[0.1], [0.3]]])  # [1, 2, 1]
    np.testing.assert_allclose(mixture_objective(scores, 1.0), [[np.log(0.2)]], rtol=1e-6)
    np.testing.assert_allclose(mixture_posterior(scores, 1.0), [[[0.25], [0.75]]], rtol=1e-6)
    figures = mixture_figures(scores, 1.0)
    np.testing.assert_allclose(figures.usage, [0.25, 0.75], rtol=1e-6)
    entropy = -0.25 * np.log(0.25) - 0.75 * np.log(0.75)
    np.testing.assert_allclose(figures.entropy, entropy, rtol=1e-6)


@pytest.mark.parametrize("copies", [1, 3])
def test_equal_components_have_exactly_the_plain_loss(copies):
    rng = np.random.default_rng(1)
    antecedents = tf.constant(rng.standard_normal([6, 8]), tf.float32)
    consequents = tf.constant(rng.standard_normal([6, 5, 8]), tf.float32)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([antecedents, consequents])
        plain = nce.nce_loss(antecedents, consequents, 20.0, 0.04)
        components = tf.repeat(antecedents[:, None], copies, axis=1)
        mixed = nce.mixture_loss(components, consequents, 20.0, 0.04, 0.7)
    exact = np.testing.assert_array_equal if copies == 1 else np.testing.assert_allclose
    exact(mixed.loss.numpy(), plain.loss.numpy())
    for value in (antecedents, consequents):
        np.testing.assert_allclose(
            tape.gradient(mixed.loss, value), tape.gradient(plain.loss, value), rtol=1e-5, atol=1e-7
        )
    np.testing.assert_allclose(mixed.regularizer, plain.regularizer, rtol=1e-6)


def test_mixture_loss_equals_components_one_by_one():
    rng = np.random.default_rng(2)
    B, K, S, D = 5, 3, 4, 6
    antecedents = tf.constant(rng.standard_normal([B, K, D]))
    consequents = tf.constant(rng.standard_normal([B, S, D]))
    scores, squares = np.empty([B, K, S]), 0.0
    for k in range(K):
        matching = nce.scaled_scores(antecedents[:, k], consequents)
        scores[:, k] = nce.nce_log_probabilities(nce.soft_clip(matching, 2.0))[0]
        squares += np.mean(np.square(matching)) / K
    loss, regularizer, figures = nce.mixture_loss(antecedents, consequents, 2.0, 0.5, 3.0)
    q = np.exp(3 * scores) / np.exp(3 * scores).sum(axis=1, keepdims=True)
    expected = _explicit(scores, q, 3.0) - np.log(K) / 3
    np.testing.assert_allclose(loss, -expected.mean(), rtol=1e-9)
    np.testing.assert_allclose(regularizer, 0.5 * squares, rtol=1e-9)
    np.testing.assert_allclose(figures.usage, q.mean(axis=(0, 2)), rtol=1e-9)
    with pytest.raises(ValueError, match="at least 2"):
        nce.mixture_loss(antecedents[:1], consequents[:1], 2.0, 0.5, 3.0)


def test_layer_starts_near_f1_and_makes_components_differ():
    keras.utils.set_random_seed(0)
    layer = Mixture(4)
    f1 = tf.random.stateless_normal([50, 64], [0, 1])
    components = layer(f1)
    assert components.shape == (50, 4, 64)
    residuals = components - f1[:, None]
    assert 0.001 < float(tf.math.reduce_std(residuals)) < 0.1
    for first in range(4):
        for second in range(first):
            assert np.abs(residuals[:, first] - residuals[:, second]).max() > 1e-3
    copy = Mixture.from_config(layer.get_config())
    copy.build((None, 64))
    for ours, theirs in zip(copy.variables, layer.variables, strict=True):
        ours.assign(theirs)
    np.testing.assert_array_equal(copy(f1), components)


def test_posterior_of_an_image_is_that_of_a_batch_with_these_negatives():
    rng = np.random.default_rng(3)
    B, K, S, D = 4, 3, 5, 6
    components = tf.constant(rng.standard_normal([B, K, D]), tf.float32)
    consequents = tf.constant(rng.standard_normal([B, S, D]), tf.float32)
    for image in range(B):
        others = np.delete(consequents.numpy(), image, axis=0).reshape(-1, D)
        scores = mixture.image_scores(
            components[image : image + 1], consequents[image : image + 1], tf.constant(others),
            len(others), 20.0,
        )  # fmt: skip
        for k in range(K):
            matching = nce.soft_clip(nce.scaled_scores(components[:, k], consequents), 20.0)
            expected, _ = nce.nce_log_probabilities(matching)
            np.testing.assert_allclose(scores[0, k], expected[image], rtol=1e-4)
    # Twice the negatives, said to stand for as many as before, change nothing.
    first = consequents[:1]
    once, twice = (
        mixture.image_scores(components[:1], first, tf.constant(bank), len(others), 20.0)
        for bank in (others, np.concatenate([others, others]))
    )
    np.testing.assert_allclose(once, twice, rtol=1e-5)


def test_a_step_moves_the_mixture_and_logs_it():
    model = make_model(warmup_steps=0, mixture_components=3)
    before = {variable.path: variable.numpy() for variable in model.mixture.variables}
    logs = tf.function(model.train_step)(make_batch())
    for variable in model.mixture.variables:
        assert not np.array_equal(variable.numpy(), before[variable.path]), variable.path
    usage = [float(logs[f"mixture_usage_{number}"]) for number in range(3)]
    assert abs(sum(usage) - 1) < 1e-5
    assert 0 < float(logs["mixture_entropy"]) <= np.log(3) + 1e-5
    mean = (float(logs["loss_1to5"]) + float(logs["loss_1to7"])) / 2
    np.testing.assert_allclose(float(logs["mixture_objective"]), -mean, rtol=1e-6)
    posterior = model.posterior(*[model.encode(make_batch()["view1"])[n] for n in ("f1", "phi7")])
    assert posterior.shape == (8, 7, 7, 3)
    np.testing.assert_allclose(tf.reduce_sum(posterior, -1), np.ones([8, 7, 7]), rtol=1e-5)


def test_a_posterior_does_not_depend_on_the_batch():
    model = make_model(warmup_steps=0, mixture_components=2)
    tf.function(model.train_step)(make_batch())
    outputs = model.encode(make_batch(seed=1)["view1"])
    together = model.posterior(outputs["f1"], outputs["phi7"])
    alone = model.posterior(outputs["f1"][3:4], outputs["phi7"][3:4])
    np.testing.assert_allclose(together[3:4], alone, atol=1e-5)


def test_a_posterior_takes_the_locations_of_the_same_images():
    model = make_model(mixture_components=2)
    outputs = model.encode(make_batch()["view1"])
    for phi7 in (outputs["phi7"][:3], outputs["phi5"]):
        with pytest.raises(ValueError, match="phi7 of as many images as f1"):
            model.posterior(outputs["f1"], phi7)


def test_negatives_are_of_all_images_of_a_batch_however_large():
    images, places, chosen = 60_000, 49, mixture._NEGATIVES
    assert images * places * chosen > 2**31
    numbers = tf.reshape(tf.range(images * places, dtype=tf.int32), [images, places, 1])
    layer = mixture.Mixture(2)
    found = layer.choose_negatives(tf.cast(numbers, tf.float32), images, 0)[:, 0].numpy()
    expected = np.arange(chosen) * (images * places) // chosen
    np.testing.assert_array_equal(found, expected)
    halves = [
        layer.choose_negatives(tf.cast(half, tf.float32), images, offset)[:, 0].numpy()
        for half, offset in zip(tf.split(numbers, 2), (0, images // 2), strict=True)
    ]
    np.testing.assert_array_equal(sum(halves), expected)


def test_one_component_without_residual_trains_as_the_plain_model():
    """The mixture's own weights aside, every loss and gradient is that of a model without it."""
    losses, gradients = [], []
    plain = make_model()
    mixed = make_model(mixture_components=1)
    weights = {variable.path: variable for variable in plain.variables}
    for variable in mixed.variables:
        if variable.path in weights:
            variable.assign(weights[variable.path])
    for variable in mixed.mixture.residuals.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    batch = make_batch()
    for model in (plain, mixed):
        data = {**batch, **model.training_step.draw(len(batch["label"]))}
        backward = model.training_step._backward(data, scale=None)
        losses.append([float(backward.logs[f"loss_{task}"]) for task in model.settings.tasks])
        of = dict(zip([v.path for v in model.trained_variables()], backward.gradients, strict=True))
        gradients.append([of[variable.path] for variable in model.encoder.trainable_variables])
    assert losses[0] == losses[1]
    for first, second in zip(*gradients, strict=True):
        np.testing.assert_allclose(first, second, atol=1e-5 * np.abs(first).max() + 1e-9)


def test_components_learn_to_differ_where_images_have_two_parts():
    """Upper and lower halves of independent colours: posteriors separate them after training."""
    model = make_model(classes=0, warmup_steps=0, learning_rate=3e-3, mixture_components=2,
                       batch_size=16, mixture_temperature=2.0)  # fmt: skip
    step, rng = tf.function(model.train_step), np.random.default_rng(0)

    def images(count):
        colours = rng.uniform(-2, 2, [count, 2, 1, 1, 3]).astype(np.float32)
        halves = np.tile(colours, [1, 1, 16, 32, 1]).reshape(count, 32, 32, 3)
        return tf.constant(halves)

    for _ in range(150):
        batch = images(16)
        step({"view1": batch, "view2": batch, "label": tf.fill([16], -1)})
    outputs = model.encode(images(50))
    components = model.posterior(outputs["f1"], outputs["phi7"]).numpy().argmax(-1)  # [50, 7, 7]
    upper, lower = components[:, :3].reshape(50, -1), components[:, 4:].reshape(50, -1)
    clear = (upper.mean(1) - lower.mean(1)) ** 2 > 0.9
    assert clear.mean() > 0.7, clear.mean()


def test_watch_warns_once_of_unused_and_of_equal_components():
    warned = []
    watch = MixtureWatch(3, warned.append)
    good = {"mixture_usage_0": 0.4, "mixture_usage_1": 0.3, "mixture_usage_2": 0.3,
            "mixture_entropy": 0.5}  # fmt: skip
    unused = {**good, "mixture_usage_0": 0.69, "mixture_usage_2": 0.01}
    for step in range(0, 2000, 100):
        watch.look(step, unused if step != 700 else good)
    assert len(warned) == 1 and "component 2" in warned[0] and "--mixture_temperature" in warned[0]
    equal = {**good, "mixture_entropy": np.log(3) - 1e-4}
    for step in range(2000, 4000, 100):
        watch.look(step, equal)
    assert len(warned) == 2 and "alike" in warned[1]
    alone = MixtureWatch(1, warned.append)
    for step in range(0, 4000, 100):
        alone.look(step, {"mixture_usage_0": 1.0, "mixture_entropy": 0.0})
    assert len(warned) == 2


def test_a_mixture_needs_the_task_1to7():
    flags = [*TINY, "--mixture_components=2", "--tasks=1to5", "--model_dir=/nowhere/run"]
    assert "1to7" in refused("train", *flags)


@pytest.mark.slow
def test_a_mixture_resumes_and_is_logged(tmp_path):
    config = make_config(ndf=4, n_depth=1, mixture_components=2, log_steps=2)
    for steps in (2, 4):
        training_loop.train(config_lib.update(config, {"train_steps": steps}), tmp_path)
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert {"mixture_usage_1", "mixture_entropy", "mixture_objective"} <= set(header.split(","))
    assert len(rows) == 2
    model = checkpoints.load_model(tmp_path)
    assert model.mixture.components == 2 and np.abs(model.mixture.negatives.numpy()).min() > 0
    assert make_config(mixture_components=2).model.mixture_temperature == 1.0
