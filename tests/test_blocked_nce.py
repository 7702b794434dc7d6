"""NCE in blocks: the values and gradients of the dense form."""

import numpy as np
import pytest
import tensorflow as tf

from amdim_tf import nce
from amdim_tf.blocked_nce import block_rows, blocked_losses


def _inputs(batch=7, locations=5, channels=6, seed=0):
    rng = np.random.default_rng(seed)
    antecedents = 3 * rng.standard_normal([batch, channels]).astype(np.float32)
    consequents = 3 * rng.standard_normal([batch, locations, channels]).astype(np.float32)
    return tf.constant(antecedents), tf.constant(consequents)


def _loss_and_gradients(antecedents, consequents, clip, block):
    @tf.function
    def compute(antecedents, consequents):
        with tf.GradientTape() as tape:
            tape.watch([antecedents, consequents])
            result = nce.nce_loss(antecedents, consequents, clip, 0.3, block)
            total = 5 * (result.loss + result.regularizer)
        return result, tape.gradient(total, [antecedents, consequents])

    return tf.nest.flatten(compute(antecedents, consequents))


@pytest.mark.parametrize("clip", [0.0, 4.0])
@pytest.mark.parametrize("block", ["1", "2", "3", "5", "6"])
def test_blocks_equal_the_dense_form(block, clip):
    inputs = _inputs()
    expected = _loss_and_gradients(*inputs, clip, "7")
    for actual, value in zip(_loss_and_gradients(*inputs, clip, block), expected, strict=True):
        np.testing.assert_allclose(actual, value, rtol=2e-5, atol=2e-6)


def test_several_antecedents_of_an_image():
    """The losses of a block are any function of its scores."""
    rng = np.random.default_rng(1)
    antecedents = tf.constant(rng.standard_normal([5, 3, 6]).astype(np.float32))
    consequents = tf.constant(rng.standard_normal([8, 2, 6]).astype(np.float32))

    def losses_of_rows(scores, offset):
        assert scores.shape[1:] == (3, 8, 2)
        weights = tf.cast(tf.range(scores.shape[0]) + offset, tf.float32)
        return (tf.reduce_sum(weights * tf.reduce_logsumexp(scores, axis=[1, 2, 3])),)

    def dense(antecedents, consequents):
        scores = tf.einsum("akd,bsd->akbs", antecedents, consequents) / 6**0.5
        return losses_of_rows(scores, 0)

    results = []
    for losses in (dense, lambda a, t: blocked_losses(losses_of_rows, a, t, 2)):
        with tf.GradientTape() as tape:
            tape.watch([antecedents, consequents])
            (loss,) = losses(antecedents, consequents)
        results.append([loss, *tape.gradient(loss, [antecedents, consequents])])
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_how_many_images_are_scored_at_a_time():
    assert block_rows("auto", 128, [128, 49, 64]) == 128  # 3 MiB
    assert block_rows("auto", 4096, [4096, 49, 1024]) == 64  # 64 blocks; 0.77 MiB for each image
    assert block_rows("auto", 4096, [4096, 49, 1024], components=10) == 6
    assert block_rows("auto", 2, [10**6, 49, 8]) == 1
    assert block_rows("100", 64, [64, 49, 8]) == 64
    assert block_rows("100", 300, [300, 49, 8]) == 100
