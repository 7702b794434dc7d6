"""The NCE over replicas: what they compute and exchange adds up to the loss of the whole batch.

Here the parts of a batch are put together by hand; test_distribution.py has real replicas.
"""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from amdim_tf import nce
from amdim_tf.replica_nce import negative_sums


def _inputs(batch, components, locations, channels, seed):
    rng = np.random.default_rng(seed)
    antecedents = 3 * rng.standard_normal([batch, components, channels]).astype(np.float32)
    consequents = 3 * rng.standard_normal([batch, locations, channels]).astype(np.float32)
    return tf.constant(antecedents), tf.constant(consequents)


def _by_parts(antecedents, consequents, parts, clip, block):
    """The log of Σ over the negatives of the whole batch, and the sum of squares, part by part."""
    size = consequents.shape[0] // parts
    found = [
        negative_sums(
            antecedents, consequents[part * size : (part + 1) * size], clip, part * size, block
        )
        for part in range(parts)
    ]
    log_sums, squares = zip(*found, strict=True)
    return tf.reduce_logsumexp(tf.stack(log_sums), axis=0), tf.add_n(list(squares))


def _at_once(antecedents, consequents, clip):
    """The same with a loop over images."""
    B, _, D = antecedents.shape
    scores = tf.einsum("ikd,jsd->ikjs", antecedents, consequents) / D**0.5
    clipped = nce.soft_clip(scores, clip)
    rows = [
        tf.reduce_logsumexp(tf.concat([clipped[i, :, :i], clipped[i, :, i + 1 :]], 1), axis=[1, 2])
        for i in range(B)
    ]
    return tf.stack(rows), tf.reduce_sum(tf.square(scores))


@settings(deadline=None, max_examples=25)
@given(
    parts=st.integers(1, 4),
    size=st.integers(1, 3),
    components=st.integers(1, 3),
    clip=st.sampled_from([0.0, 4.0]),
    block=st.sampled_from(["auto", "1", "2", "5"]),
    seed=st.integers(0, 10**6),
)
def test_parts_add_up(parts, size, components, clip, block, seed):
    batch = max(parts * size, 2 * parts)  # at least two images
    inputs = _inputs(batch, components, 2, 5, seed)
    weights = tf.constant(
        np.random.default_rng(seed).standard_normal([batch, components]), tf.float32
    )
    results = []
    for function in (
        lambda a, t: _at_once(a, t, clip),
        lambda a, t: _by_parts(a, t, parts, clip, block),
    ):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            sums, squares = function(*inputs)
            total = tf.reduce_sum(weights * sums) + 0.1 * squares
        results.append([sums, squares, *tape.gradient(total, inputs)])
    for expected, found in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", ["auto", "2"])
def test_compiled_by_xla(block):
    inputs = _inputs(6, 2, 3, 5, 0)

    def compute(compiled):
        @tf.function(jit_compile=compiled)
        def function(antecedents, consequents, offset):
            with tf.GradientTape() as tape:
                tape.watch([antecedents, consequents])
                sums, squares = negative_sums(
                    antecedents, consequents, 4.0, offset, block, compiled
                )
                total = tf.reduce_sum(sums) + squares
            return sums, squares, *tape.gradient(total, [antecedents, consequents])

        return function(inputs[0], inputs[1][2:4], tf.constant(2))

    for found, expected in zip(compute(True), compute(False), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_replica_with_one_image():
    """Its own image has no negatives there, and what the others give is all there is."""
    antecedents, consequents = _inputs(3, 1, 2, 4, 1)
    sums, _ = negative_sums(antecedents, consequents[1:2], 0.0, 1)
    assert np.isfinite(sums).all() and sums[1, 0] < -1e38
    whole, _ = _by_parts(antecedents, consequents, 3, 0.0, "auto")
    np.testing.assert_allclose(whole, _at_once(antecedents, consequents, 0.0)[0], rtol=1e-5)
