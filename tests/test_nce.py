"""nce.py against slow loops, finite differences and extreme scores."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from amdim_tf import nce


def _slow_loss(antecedents, consequents, clip, regularization):
    """The specification as loops over images, other images and locations, in float64."""
    B, S, D = consequents.shape
    scores = np.zeros([B, B, S])
    for i in range(B):
        for j in range(B):
            for k in range(S):
                scores[i, j, k] = antecedents[i] @ consequents[j, k] / np.sqrt(D)
    regularizer = regularization * np.mean(scores**2)
    if clip:
        scores = clip * np.tanh(scores / clip)
    log_probabilities = np.zeros([B, S])
    for i in range(B):
        negatives = [scores[i, j, k] for j in range(B) if j != i for k in range(S)]
        for location in range(S):
            terms = np.array([scores[i, i, location], *negatives])
            shift = terms.max()
            log_sum = shift + np.log(np.exp(terms - shift).sum())
            log_probabilities[i, location] = scores[i, i, location] - log_sum
    return -log_probabilities.mean(), regularizer


def _random(rng, *shape, scale=1.0):
    return scale * rng.standard_normal(shape)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    B=st.integers(2, 7),
    S=st.integers(1, 9),
    D=st.integers(1, 12),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    clip=st.sampled_from([0.0, 1.0, 20.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_triple_loop(B, S, D, scale, clip, seed):
    rng = np.random.default_rng(seed)
    antecedents, consequents = _random(rng, B, D, scale=scale), _random(rng, B, S, D, scale=scale)
    expected = _slow_loss(antecedents, consequents, clip, 0.04)
    actual = nce.nce_loss(tf.constant(antecedents), tf.constant(consequents), clip, 0.04)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)
    single = nce.nce_loss(
        tf.constant(antecedents, tf.float32), tf.constant(consequents, tf.float32), clip, 0.04
    )
    assert single.loss.dtype == tf.float32
    np.testing.assert_allclose(single, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clip", [0.0, 2.0])
def test_gradient_equals_finite_differences(clip):
    rng = np.random.default_rng(0)
    values = [_random(rng, 4, 5), _random(rng, 4, 3, 5)]

    def total(a, t):
        result = nce.nce_loss(tf.constant(a), tf.constant(t), clip, 0.5)
        return float(result.loss + result.regularizer)

    tensors = [tf.constant(value) for value in values]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        loss, regularizer = nce.nce_loss(*tensors, clip, 0.5)
        objective = loss + regularizer
    gradients = tape.gradient(objective, tensors)
    for which, gradient in enumerate(gradients):
        numeric = np.zeros_like(values[which])
        for place in np.ndindex(*numeric.shape):
            for sign in (1, -1):
                moved = [value.copy() for value in values]
                moved[which][place] += sign * 1e-5
                numeric[place] += sign * total(*moved) / 2e-5
        np.testing.assert_allclose(gradient, numeric, atol=1e-8)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_of_ten_thousand(sign):
    # D = 1, so scores are plain products: positives ±1e4, negatives ∓1e4.
    antecedents = tf.constant([[100.0], [-100.0]])
    consequents = sign * tf.constant([[[100.0], [100.0]], [[-100.0], [-100.0]]])
    with tf.GradientTape() as tape:
        tape.watch(antecedents)
        loss, _ = nce.nce_loss(antecedents, consequents, 0.0, 0.0)
    expected = 0.0 if sign > 0 else 2e4 + np.log(2)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert np.isfinite(tape.gradient(loss, antecedents)).all()


def test_two_images_by_hand():
    # Scores: positives 2 and −1, negatives 1 and −2 (D = 1, S = 1, no clipping).
    antecedents, consequents = tf.constant([[1.0], [-1.0]]), tf.constant([[[2.0]], [[1.0]]])
    log_probabilities, positives = nce.nce_log_probabilities(
        nce.scaled_scores(antecedents, consequents)
    )
    np.testing.assert_allclose(positives, [[2.0], [-1.0]])
    expected = [[-np.log1p(np.exp(-1.0))], [-np.log1p(np.exp(-1.0))]]
    np.testing.assert_allclose(log_probabilities, expected, rtol=1e-6)


def test_one_image_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        nce.nce_loss(tf.zeros([1, 3]), tf.zeros([1, 4, 3]), 20.0, 0.04)


def test_offset_picks_the_positives_of_a_part_of_the_batch():
    rng = np.random.default_rng(1)
    antecedents, consequents = _random(rng, 6, 4), tf.constant(_random(rng, 6, 3, 4))
    whole, _ = nce.nce_log_probabilities(nce.scaled_scores(tf.constant(antecedents), consequents))
    part, _ = nce.nce_log_probabilities(
        nce.scaled_scores(tf.constant(antecedents[2:5]), consequents), offset=2
    )
    np.testing.assert_allclose(part, whole[2:5])


def test_soft_clip_by_hand():
    np.testing.assert_allclose(
        nce.soft_clip(tf.constant([0.0, 20.0, -1e4]), 20.0), [0, 20 * np.tanh(1), -20], rtol=1e-6
    )
    np.testing.assert_allclose(nce.soft_clip(tf.constant([3.0, -1e4]), 0.0), [3.0, -1e4])


def test_half_precision_is_scored_in_float32():
    rng = np.random.default_rng(2)
    a, t = tf.constant(_random(rng, 3, 8)), tf.constant(_random(rng, 3, 2, 8))
    loss, regularizer = nce.nce_loss(tf.cast(a, tf.bfloat16), tf.cast(t, tf.bfloat16), 20.0, 0.04)
    assert loss.dtype == regularizer.dtype == tf.float32


def _views(rng, batch, dimension):
    return {
        1: tf.constant(_random(rng, batch, dimension)),
        5: tf.constant(_random(rng, batch, 5, 5, dimension)),
        7: tf.constant(_random(rng, batch, 7, 7, dimension)),
    }


@pytest.mark.parametrize("task", [f"{n}to{m}" for n in (1, 5, 7) for m in (1, 5, 7)])
def test_any_task_in_both_directions(task):
    rng = np.random.default_rng(3)
    view1, view2 = _views(rng, 4, 6), _views(rng, 4, 6)
    n, m = int(task[0]), int(task[3])
    locations = [{n: tf.constant(rng.integers(0, n * n, 4))} for _ in range(2)]
    result = nce.multiscale_losses([task], view1, view2, *locations, 20.0, 0.04)[task]
    expected = np.zeros(2)
    for source, target, places in ((view1, view2, locations[0]), (view2, view1, locations[1])):
        maps = source[n].numpy().reshape(4, -1, 6)
        antecedents = np.stack([maps[i, places[n][i] if n > 1 else 0] for i in range(4)])
        consequents = target[m].numpy().reshape(4, -1, 6)
        expected += np.array(_slow_loss(antecedents, consequents, 20.0, 0.04)) / 2
    np.testing.assert_allclose(result, expected, rtol=1e-9)


@pytest.mark.parametrize("block", ["auto", "3"])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_gradients_of_all_tasks(side_by_side, block):
    rng = np.random.default_rng(4)
    given = _views(rng, 4, 6), _views(rng, 4, 6)
    given = tf.nest.map_structure(lambda values: tf.cast(values, tf.float32), given)
    locations = [{5: tf.constant(rng.integers(0, 25, 4))} for _ in range(2)]
    tasks = ["1to5", "1to7", "5to5"]
    with tf.GradientTape() as tape:
        tape.watch(tf.nest.flatten(given))
        expected = nce.multiscale_losses(tasks, *given, *locations, 20.0, 0.04)
        total = tf.add_n([tf.add_n(result) for result in expected.values()])
    slopes = tape.gradient(total, given)

    @tf.function(autograph=False)
    def compute(view1, view2):
        return nce.multiscale_gradients(
            tasks, view1, view2, *locations, 20.0, 0.04, block, side_by_side=side_by_side
        )

    found, (*gradient, mixtures) = compute(*given)
    assert mixtures == ()
    for task in tasks:
        np.testing.assert_allclose(found[task], expected[task], rtol=1e-5)
    for a, b in zip(tf.nest.flatten(gradient), tf.nest.flatten(slopes), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
