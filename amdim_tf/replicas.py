"""What a step asks of the replicas it runs on; on one device, all of it is nothing.

Everything here is called in replica context, by all replicas in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


def count() -> int:
    """Replicas of all workers together."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def first_image(images: int):
    """The place in the global batch of the first of this replica's images."""
    if count() == 1:
        return 0
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    return tf.cast(number, tf.int32) * images


def summed(values):
    """Sums of tensors, or of structures of tensors, over the replicas; differentiable."""
    if count() == 1:
        return values
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values)


@tf.custom_gradient
def gathered(values):
    """Tensors of all replicas one after the other, [b, ...] -> [B, ...]; differentiable.

    TensorFlow's own gradient of this gathers the shapes a second time, and loses them.
    """
    images = values.shape[0]
    whole = tf.distribute.get_replica_context().all_gather(values, axis=0)

    def gradient(upstream):
        return own_rows(summed(upstream), images)

    return tf.ensure_shape(whole, [images * count(), *values.shape[1:]]), gradient


def own_rows(values, images: int):
    """The rows of what was gathered that are this replica's own: [B, ...] -> [b, ...]."""
    begin = [first_image(images)] + [0] * (values.shape.rank - 1)
    return tf.slice(values, begin, [images, *values.shape[1:]])


def together(function: Callable, *arguments) -> None:
    """Calls function(strategy, *arguments) once for all replicas, with each one's arguments."""
    tf.distribute.get_replica_context().merge_call(function, args=arguments)
