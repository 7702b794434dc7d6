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

from amdim_tf.blocked_nce import empty


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


def stacked(function: Callable, count: int, compiled: bool = False):
    """function(0), ..., function(count − 1), one after the other, as one batch of rows.

    Each is written into its place in one tensor: of a list of them, memory would be taken twice, as
    pieces and as a whole.

    Args:
        function: number -> structure of tensors [n, ...].
        count: how many.
        compiled: whether XLA compiles this. It has no operation that writes in place, and reuses
            memory by itself.

    Returns:
        The structure of tensors [count · n, ...].
    """
    first = function(tf.constant(0))
    leaves = tf.nest.flatten(first)

    def put(whole, number, leaf):
        if compiled:
            return tf.tensor_scatter_nd_update(whole, [[number]], leaf[None])
        return tf.raw_ops.InplaceUpdate(x=whole, i=[number], v=leaf[None])

    def body(number, wholes):
        leaves = tf.nest.flatten(function(number))
        pairs = zip(wholes, leaves, strict=True)
        return number + 1, [put(whole, number, leaf) for whole, leaf in pairs]

    wholes = [put(empty([count, *leaf.shape], leaf.dtype, compiled), 0, leaf) for leaf in leaves]
    _, wholes = tf.while_loop(
        lambda number, _: number < count, body, (tf.constant(1), wholes), parallel_iterations=1
    )
    batches = [
        tf.reshape(whole, [count * leaf.shape[0], *leaf.shape[1:]])
        for whole, leaf in zip(wholes, leaves, strict=True)
    ]
    return tf.nest.pack_sequence_as(first, batches)


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
