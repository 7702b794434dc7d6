"""Mixture features: the network m_k, and posteriors of single images (paper section 3.7)."""

from __future__ import annotations

import keras
import tensorflow as tf

from amdim_tf import nce
from amdim_tf.blocks import fan_in_uniform
from amdim_tf.mixture_objective import mixture_posterior

# Local embeddings of other images that posteriors are computed against outside training.
_NEGATIVES = 1024
# The residuals' first weights, as a share of the usual ones: components start near f1, not equal.
_FIRST_SHARE = 0.1


@keras.saving.register_keras_serializable("amdim_tf")
class Mixture(keras.layers.Layer):
    """m_k: one hidden layer with ReLU, whose k outputs are each added to f1.

    It also keeps some of the last batch's local embeddings. An NCE score needs negatives, and with
    these the posterior of an image depends on nothing else that happens to be in its batch.

    Args:
        components: k.

    Shapes: [N, D] -> [N, k, D].
    """

    def __init__(self, components, **kwargs):
        super().__init__(**kwargs)
        self.components = components

    def build(self, input_shape):
        """Creates both dense layers and the place for negatives."""
        D = input_shape[-1]
        outputs = self.components * D
        self.hidden = keras.layers.Dense(
            D, "relu", kernel_initializer=fan_in_uniform(), bias_initializer=fan_in_uniform(D),
            name="hidden", dtype=self.dtype_policy,
        )  # fmt: skip
        self.residuals = keras.layers.Dense(
            outputs, kernel_initializer=fan_in_uniform(round(D / _FIRST_SHARE**2)),
            name="residuals", dtype=self.dtype_policy,
        )  # fmt: skip
        self.hidden.build(input_shape)
        self.residuals.build((*input_shape[:-1], D))
        self.negatives = self.add_weight(
            name="negatives", shape=(_NEGATIVES, D), initializer="zeros", trainable=False,
            dtype="float32",
        )  # fmt: skip

    def call(self, f1):
        """The components of each image."""
        residuals = self.residuals(self.hidden(f1))  # [N, k·D]
        residuals = tf.reshape(residuals, [-1, self.components, f1.shape[-1]])  # [N, k, D]
        return f1[:, None] + residuals

    def choose_negatives(self, embedding, batch: int, offset):
        """Vectors of a training batch's φ7, from all of its images, to be kept: [M, D].

        Args:
            embedding: [b, S, D], of the images from `offset` on; what is chosen of other images is
                zero, so that the sum over replicas is the choice.
            batch: images of the global batch.
            offset: see above.
        """
        b, S, D = embedding.shape
        places = tf.range(_NEGATIVES, dtype=tf.int64) * (batch * S) // _NEGATIVES  # [M]
        places -= tf.cast(offset, tf.int64) * S
        own = (places >= 0) & (places < b * S)
        vectors = tf.gather(tf.reshape(embedding, [b * S, D]), tf.where(own, places, 0))
        return tf.where(own[:, None], tf.cast(vectors, tf.float32), 0.0)

    def get_config(self):
        """The constructor's arguments."""
        return {**super().get_config(), "components": self.components}


def image_scores(components, consequents, negatives, count: int, clip: float):
    """NCE scores of images one by one, against negatives that are the same for all.

    The sum over negatives is scaled from those given to `count`, as many as a training batch has,
    so that scores are those that the components were trained on.

    Args:
        components: [N, K, D], from one view of each image.
        consequents: [N, S, D], from the other.
        negatives: [M, D].
        count: negatives of an image in a training batch.
        clip: c of the scores, or 0.

    Returns:
        log p, [N, K, S].
    """
    N, K, D = tf.shape(components)[0], *components.shape[1:]
    M = negatives.shape[0]
    positives = tf.matmul(components, consequents, transpose_b=True) * D**-0.5  # [N, K, S]
    others = nce.scaled_scores(tf.reshape(components, [N * K, D]), negatives[None])  # [N·K, 1, M]
    others = tf.reshape(nce.soft_clip(others, clip), [N, K, M])
    log_negatives = tf.reduce_logsumexp(others, axis=2, keepdims=True)  # [N, K, 1]
    log_negatives += tf.math.log(count / M)
    return -tf.nn.softplus(log_negatives - nce.soft_clip(positives, clip))


def image_posteriors(components, embedding, negatives, count: int, clip: float, temperature: float):
    """The share of each component in each location, given components of the other view.

    Args:
        components: [N, K, D].
        embedding: φ7, [N, H, W, D].
        negatives, count, clip: as in `image_scores`.
        temperature: τ.

    Returns:
        [N, H, W, K]; sums to 1 over K.
    """
    _, H, W, _ = embedding.shape
    scores = image_scores(components, nce.flat_locations(embedding), negatives, count, clip)
    posterior = mixture_posterior(scores, temperature)  # [N, K, S]
    posterior = tf.transpose(posterior, [0, 2, 1])  # [N, S, K]
    return tf.reshape(posterior, [-1, H, W, components.shape[1]])
