"""Batch normalization of several groups of images, on one replica or over all of them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses

import keras
import tensorflow as tf

from amdim_tf import replicas


@dataclasses.dataclass
class Collector:
    """Batch statistics that do not move the running ones yet.

    Attributes:
        synchronized: normalize by the moments of all replicas' images.
        moments: path of a layer's running mean -> float32 [2, G, C], the mean and the unbiased
            variance of each group.
    """

    synchronized: bool = False
    moments: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)

    def add(self, path: str, mean, variance) -> None:
        """Keeps a layer's statistics [G, C], after those of groups that passed it before."""
        moments = tf.stack([mean, variance])  # [2, G, C]
        if path in self.moments:
            moments = tf.concat([self.moments[path], moments], axis=1)
        self.moments[path] = moments


_COLLECTOR: contextvars.ContextVar[Collector | None] = contextvars.ContextVar(
    "collector", default=None
)


@contextlib.contextmanager
def collected(synchronized: bool):
    """Within it, layers in training hand their statistics to the collector it yields.

    Replicas and microbatches average them before the running statistics move, and a step that is
    withheld moves none.
    """
    collector = Collector(synchronized)
    token = _COLLECTOR.set(collector)
    try:
        yield collector
    finally:
        _COLLECTOR.reset(token)


def _moments(grouped):
    """Mean and variance [G, C] of grouped [G, M, C], and M."""
    return *tf.nn.moments(grouped, axes=1), tf.cast(tf.shape(grouped)[1], tf.float32)


def global_moments(grouped):
    """The same over the images of all replicas, with gradients through both sums.

    Two passes, as on one device: the mean first, then the squares of what differs from it. The
    difference of two large sums would lose the variance of channels far from zero.
    """
    samples = tf.cast(tf.shape(grouped)[1], tf.float32) * replicas.count()
    mean = replicas.summed(tf.reduce_sum(grouped, axis=1)) / samples  # [G, C]
    squares = tf.reduce_sum(tf.square(grouped - mean[:, None]), axis=1)  # [G, C]
    return mean, replicas.summed(squares) / samples, samples


@keras.saving.register_keras_serializable("amdim_tf")
class BatchNorm(keras.layers.Layer):
    """Batch normalization of batches that hold several groups of images.

    The two views of a batch go through the encoder in one pass, as one batch of two groups, yet
    each view is normalized by its own statistics, as in the reference. Differences from
    keras.layers.BatchNormalization: the groups, and the running variance, which is updated with
    the unbiased estimate as PyTorch does.

    Args:
        momentum: decay of the running statistics.
        epsilon: added to the variance.

    Shapes: [N, ..., C] -> [N, ..., C], with N divisible by `groups`; groups are consecutive.
    """

    def __init__(self, momentum: float = 0.9, epsilon: float = 1e-5, **kwargs):
        super().__init__(**kwargs)
        self.momentum = momentum
        self.epsilon = epsilon

    def build(self, input_shape):
        """Creates scale, offset and the running statistics, in float32 under any policy."""

        def weight(name, initializer, trainable):
            return self.add_weight(
                shape=(input_shape[-1],), name=name, initializer=initializer, trainable=trainable,
                dtype="float32", autocast=False,
            )  # fmt: skip

        self.gamma = weight("gamma", "ones", True)
        self.beta = weight("beta", "zeros", True)
        self.moving_mean = weight("moving_mean", "zeros", False)
        self.moving_variance = weight("moving_variance", "ones", False)

    def call(self, inputs, training=False, groups=1):
        """Normalizes by batch statistics in training, by running statistics otherwise."""
        if not training:
            scale = self.gamma * tf.math.rsqrt(self.moving_variance + self.epsilon)  # [C]
            offset = self.beta - self.moving_mean * scale  # [C]
            return inputs * tf.cast(scale, inputs.dtype) + tf.cast(offset, inputs.dtype)
        channels = inputs.shape[-1]
        grouped = tf.cast(tf.reshape(inputs, [groups, -1, channels]), tf.float32)  # [G, M, C]
        collector = _COLLECTOR.get()
        synchronized = collector is not None and collector.synchronized
        mean, variance, samples = (global_moments if synchronized else _moments)(grouped)  # [G, C]
        unbiased = variance * (samples / tf.maximum(samples - 1.0, 1.0))  # [G, C]
        if collector is None:
            self.move(mean, unbiased)
        else:
            collector.add(self.moving_mean.path, mean, unbiased)
        scale = self.gamma * tf.math.rsqrt(variance + self.epsilon)  # [G, C]
        offset = self.beta - mean * scale  # [G, C]
        normalized = grouped * scale[:, None] + offset[:, None]  # [G, M, C]
        return tf.cast(tf.reshape(normalized, tf.shape(inputs)), inputs.dtype)

    def move(self, mean, variance):
        """Moves the running statistics by each group's in turn. mean, variance: [G, C]."""
        for running, batch in ((self.moving_mean, mean), (self.moving_variance, variance)):
            value = tf.convert_to_tensor(running)  # [C]
            for group in range(batch.shape[0]):
                value = self.momentum * value + (1 - self.momentum) * batch[group]
            running.assign(value)

    def compute_output_shape(self, input_shape):
        """The input's shape."""
        return input_shape

    def get_config(self):
        """The constructor's arguments."""
        return {**super().get_config(), "momentum": self.momentum, "epsilon": self.epsilon}
