"""NCE whose memory grows with the batch, not with its square: some antecedents at a time.

The scores of a block of antecedents against all consequents hold these antecedents' complete
normalizers. So loss and gradients come out of one pass over the blocks: nothing is computed twice,
and no more than one block's scores exist at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

# `auto`: the most that one block's float32 scores take.
_BLOCK_BYTES = 50 * 2**20
# The most that a piece of the consequents' gradient takes before it is added to the rest.
_PIECE_BYTES = 2**24


def block_rows(block: str, images: int | None, consequents_shape, components: int = 1) -> int:
    """How many images' antecedents are scored at a time.

    Args:
        block: a number, or "auto": all where their scores take at most 50 MiB, else equal blocks
            of which each does.
        images: how many there are; None if it is not known, which leaves them in one block.
        consequents_shape: [B, S, D].
        components: antecedents of each image.
    """
    B, S, _ = consequents_shape
    if images is None or B is None:
        return images
    if block != "auto":
        return min(int(block), images)
    fitting = _BLOCK_BYTES // (4 * components * B * S)
    return math.ceil(images / math.ceil(images / max(fitting, 1)))


def blocked_losses(
    losses_of_rows: Callable, antecedents, consequents, size: int, compiled: bool = False
) -> tuple[tf.Tensor, ...]:
    """Sums over all blocks of the losses that `losses_of_rows` gives for one.

    Args:
        losses_of_rows: (scores [r, ..., B, S], offset) -> scalars, for r antecedents of which the
            first belongs to image `offset`. It must not use variables.
        antecedents: float32 [A, ..., D]; the dots stand for several antecedents of an image.
        consequents: float32 [B, S, D].
        size: r. Where it does not divide A, the last block is smaller.
        compiled: whether XLA compiles this. It finds buffers to reuse by itself; without it, the
            consequents' gradient is added to in place by an operation that XLA does not know.

    Returns:
        The scalars. The gradient is that of their sum: it is computed together with them, before
        anything is known of what becomes of each.
    """

    @tf.custom_gradient
    def losses(antecedents, consequents):
        values, of_antecedents, of_consequents = _in_one_pass(
            losses_of_rows, antecedents, consequents, size, compiled
        )

        def gradient(*upstream):
            return upstream[0] * of_antecedents, upstream[0] * of_consequents

        return values, gradient

    return losses(antecedents, consequents)


def blocked_sums(
    sums_of_rows: Callable, antecedents, consequents, size: int, compiled: bool = False
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums over some consequents for each antecedent, with the scores of `size` images at a time.

    These are not yet normalizers, so their gradient cannot be known in the same pass: it scores a
    second time.

    Args:
        sums_of_rows: (scores [r, K, b, S], first image) -> ([r, K], a scalar), for the antecedents
            of r images. It must not use variables.
        antecedents: float32 [B, K, D].
        consequents: float32 [b, S, D].
        size, compiled: as in `blocked_losses`.

    Returns:
        ([B, K], the sum of the scalars).
    """
    B, K, D = antecedents.shape
    flat = [consequents.shape[0] * consequents.shape[1], D]

    def of_block(start, rows):
        block = tf.slice(antecedents, [start, 0, 0], [rows, K, D])
        scores = tf.matmul(
            tf.reshape(block, [rows * K, D]), tf.reshape(consequents, flat), transpose_b=True
        )
        scores = tf.reshape(scores * D**-0.5, [rows, K, *consequents.shape[:2]])
        return sums_of_rows(scores, start)

    @tf.custom_gradient
    def sums(antecedents, consequents):
        whole = B // size
        each, scalars = tf.map_fn(
            lambda number: of_block(number * size, size),
            tf.range(whole),
            fn_output_signature=(tf.float32, tf.float32),
            parallel_iterations=1,
        )
        found, scalar = [tf.reshape(each, [whole * size, K])], tf.reduce_sum(scalars)
        if B % size:
            rest, more = of_block(whole * size, B % size)
            found, scalar = [*found, rest], scalar + more

        def gradient(of_sums, of_scalar):
            def losses_of_rows(scores, start):
                values, scalar = sums_of_rows(scores, start)
                weights = tf.slice(of_sums, [start, 0], [scores.shape[0], K])
                return tf.reduce_sum(weights * values), of_scalar * scalar

            return _in_one_pass(losses_of_rows, antecedents, consequents, size, compiled)[1:]

        return (tf.concat(found, axis=0), scalar), gradient

    return sums(antecedents, consequents)


def _in_one_pass(losses_of_rows, antecedents, consequents, size, compiled):
    """Losses, and the gradients of their sum for antecedents and consequents."""
    images = antecedents.shape[0]
    whole = images // size

    def of_block(start, rows, gradient):
        block = tf.slice(
            antecedents,
            [start] + [0] * (antecedents.shape.rank - 1),
            [rows, *antecedents.shape[1:]],
        )
        return _one_block(losses_of_rows, block, consequents, start, gradient, compiled)

    def body(number, values, of_antecedents, gradient):
        added, of_block_, gradient = of_block(number * size, size, gradient)
        values = tuple(value + more for value, more in zip(values, added, strict=True))
        return number + 1, values, of_antecedents.write(number, of_block_), gradient

    pieces = 1 if compiled else _pieces_of(consequents)
    B, S, D = consequents.shape
    shape = [pieces, B // pieces * S, D]
    gradient = empty(shape, tf.float32, compiled)
    values, last, gradient = of_block(whole * size - size, size, gradient)
    others = tf.TensorArray(tf.float32, whole - 1, element_shape=last.shape)
    _, values, others, gradient = tf.while_loop(
        lambda number, *_: number < whole - 1,
        body,
        (tf.constant(0), tuple(values), others, gradient),
        parallel_iterations=1,
    )
    of_antecedents = [tf.reshape(others.stack(), [-1, *antecedents.shape[1:]]), last]
    if images % size:
        added, rest, gradient = of_block(whole * size, images % size, gradient)
        values = tuple(value + more for value, more in zip(values, added, strict=True))
        of_antecedents.append(rest)
    return values, tf.concat(of_antecedents, 0), tf.reshape(gradient, consequents.shape)


def empty(shape, dtype, compiled: bool):
    """Zeros that may be written in place; a constant is shared between steps, and must not be."""
    if compiled:
        return tf.zeros(shape, dtype)
    return tf.ensure_shape(tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True), shape)


def _one_block(losses_of_rows, antecedents, consequents, offset, gradient, compiled):
    """Losses of a block, its antecedents' gradient, and the consequents' gradient so far.

    Args:
        antecedents: [r, ..., D].
        gradient: [P, B·S/P, D], to which the block's part is added piece by piece: a product for
            all consequents at once would be as large as they are.
    """
    B, S, D = consequents.shape
    flat = tf.reshape(consequents, [B * S, D])
    rows = tf.reshape(antecedents, [-1, D])  # [R, D], R = r times the antecedents of an image
    scores = tf.matmul(rows, flat, transpose_b=True) * D**-0.5  # [R, B·S]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(scores)
        values = losses_of_rows(tf.reshape(scores, [*antecedents.shape[:-1], B, S]), offset)
        total = tf.add_n(list(values))
    of_scores = tape.gradient(total, scores) * D**-0.5  # [R, B·S]
    of_antecedents = tf.reshape(tf.matmul(of_scores, flat), antecedents.shape)
    pieces, width, _ = gradient.shape
    if compiled:
        product = tf.matmul(of_scores, rows, transpose_a=True)  # [B·S, D]
        return tuple(values), of_antecedents, gradient + product[None]

    def add_piece(piece, gradient):
        part = tf.slice(of_scores, [0, piece * width], [rows.shape[0], width])
        product = tf.matmul(part, rows, transpose_a=True)  # [B·S/P, D]
        return piece + 1, tf.raw_ops.InplaceAdd(x=gradient, i=[piece], v=product[None])

    _, gradient = tf.while_loop(
        lambda piece, _: piece < pieces, add_piece, (tf.constant(0), gradient),
        parallel_iterations=1,
    )  # fmt: skip
    return tuple(values), of_antecedents, gradient


def _pieces_of(consequents) -> int:
    """The least number of pieces, a divisor of B, that keeps each below the limit, if any does."""
    B, S, D = consequents.shape
    allowed = [n for n in range(1, B + 1) if B % n == 0 and B // n * S * D * 4 <= _PIECE_BYTES]
    return allowed[0] if allowed else B
