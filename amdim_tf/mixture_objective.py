"""The mixture objective and posterior: pure functions of NCE scores (paper section 3.7).

The score s_j of component j for a consequent is its NCE log-probability, log p, and not the
matching score Φ: the paper takes it to be the log-softmax term of its eq. nce_log_softmax. The two
differ by what component j gives to the negatives, so that none gains by scoring everything high.
"""

from __future__ import annotations

import typing

import tensorflow as tf


def mixture_objective(scores, temperature: float):
    """The maximum over q of Σ_j q_j s_j + αH(q) − α·log K, α = 1/τ (eq. mixture_objective).

    The best q is softmax(τs) (eq. mixture_posterior), and with it the sum is α·logsumexp_j(s_j/α),
    less the constant: α·log(mean_j exp(s_j/α)). By the envelope theorem its gradient is
    Σ_j q_j ∇s_j, as if q were given.

    The constant, which the paper does not subtract, changes no gradient. With it the objective goes
    from the mean of the scores (τ → 0) to their maximum (τ → ∞), K equal components have the
    objective of one, and losses can be compared between numbers of components. The paper writes
    αH(q) inside the sum over j, so its α is 1/K of this one; its τ is the same.

    Args:
        scores: s, [..., K, S], log-probabilities of S consequents by each of K components.
        temperature: τ.

    Returns:
        [..., S].
    """
    # With the maximum taken out, expm1 and log1p keep every digit for small τ, too.
    highest = tf.stop_gradient(tf.reduce_max(scores, axis=-2, keepdims=True))  # [..., 1, S]
    excess = tf.reduce_mean(tf.math.expm1(temperature * (scores - highest)), axis=-2)  # [..., S]
    return tf.squeeze(highest, axis=-2) + tf.math.log1p(excess) / temperature


def mixture_posterior(scores, temperature: float):
    """The share q = softmax_j(τ s_j) of each component in each consequent (eq. mixture_posterior).

    Args:
        scores: s, [..., K, S].
        temperature: τ.

    Returns:
        [..., K, S]; sums to 1 over K.
    """
    return tf.nn.softmax(temperature * scores, axis=-2)


class MixtureFigures(typing.NamedTuple):
    """What tells whether the components share the work."""

    usage: tf.Tensor  # [K], mean posterior of each component; sums to 1
    entropy: tf.Tensor  # scalar, mean entropy of the posteriors, in nats


def mixture_figures(scores, temperature: float) -> MixtureFigures:
    """Usage and entropy of the posteriors of scores [B, K, S]; no gradient flows through them."""
    posterior = tf.stop_gradient(mixture_posterior(scores, temperature))  # [B, K, S]
    entropy = -tf.reduce_sum(tf.math.xlogy(posterior, posterior), axis=1)  # [B, S]
    return MixtureFigures(tf.reduce_mean(posterior, axis=[0, 2]), tf.reduce_mean(entropy))
