"""The gradient of the global-batch loss with the activations of a few images in memory.

The NCE needs the embeddings of all images, and its gradient with respect to them, but neither needs
the activations that they came from. So microbatches are embedded one after the other; then the NCE
is computed; then each microbatch is run once more, now with a tape, and sent its part of that
gradient. The result is exact. Batch norm uses the statistics of a microbatch, as it uses those of a
replica, and the running statistics move once, by the mean over microbatches.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


def size_of(images: int, most: int) -> int:
    """Images of each microbatch: the largest equal parts of `images` that have at most `most`.

    Equal, since each has batch-norm statistics of its own.
    """
    return max(size for size in range(1, min(most, images) + 1) if images % size == 0)


def rows(values, number, size: int):
    """Microbatch `number` of a structure of tensors [b, ...]: [size, ...] each."""

    def cut(value):
        begin = [number * size] + [0] * (value.shape.rank - 1)
        return tf.slice(value, begin, [size, *value.shape[1:]])

    return tf.nest.map_structure(cut, values)


def stacked(function: Callable, count: int):
    """function(0), ..., function(count − 1), one after the other, as one batch of rows.

    Args:
        function: number -> structure of tensors [n, ...].

    Returns:
        The structure of tensors [count · n, ...].
    """
    first = function(tf.constant(0))
    leaves = tf.nest.flatten(first)
    arrays = [
        tf.TensorArray(leaf.dtype, count, element_shape=leaf.shape).write(0, leaf)
        for leaf in leaves
    ]

    def body(number, arrays):
        leaves = tf.nest.flatten(function(number))
        pairs = zip(arrays, leaves, strict=True)
        return number + 1, [array.write(number, leaf) for array, leaf in pairs]

    _, arrays = tf.while_loop(
        lambda number, _: number < count, body, (tf.constant(1), arrays), parallel_iterations=1
    )
    whole = [
        tf.reshape(array.stack(), [count * leaf.shape[0], *leaf.shape[1:]])
        for array, leaf in zip(arrays, leaves, strict=True)
    ]
    return tf.nest.pack_sequence_as(first, whole)


def summed(function: Callable, count: int):
    """The sum, leaf by leaf, of function(0), ..., function(count − 1), one after the other."""
    first = function(tf.constant(0))

    def body(number, leaves):
        more = tf.nest.flatten(function(number))
        return number + 1, [a + b for a, b in zip(leaves, more, strict=True)]

    _, leaves = tf.while_loop(
        lambda number, _: number < count,
        body,
        (tf.constant(1), tf.nest.flatten(first)),
        parallel_iterations=1,
    )
    return tf.nest.pack_sequence_as(first, leaves)
