"""Convolutions with fewer multiplications (Winograd's minimal filtering).

Lavin and Gray, arXiv 1509.09308, section 4. F(3×3, 3×3) takes 25 multiplications for nine outputs
of a 3×3 convolution instead of 81. A 4×4 convolution of stride 2 is a 2×2 convolution of stride 1
over patches of 2×2 pixels, for which F(2×2, 2×2) takes nine for four outputs instead of 16. The
numbers are those of the convolution up to rounding, which in float32 is at most about twice that of
a convolution kernel; in half precision it would matter.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import typing

import numpy as np
import tensorflow as tf

# A 3×3 tile of outputs takes 5×5 inputs. These evaluate polynomials at 0, 1, −1, 2 and infinity:
# outputs = OUTPUTS · ((KERNEL · kernel) ⊙ (INPUTS · inputs)) along each axis.
_TILE, _POINTS = 3, 5
_INPUTS = np.array(
    [[2, -1, -2, 1, 0], [0, 2, 1, -1, 0], [0, -2, 3, -1, 0], [0, -1, 0, 1, 0], [0, 2, -1, -2, 1]]
)
_KERNEL = np.array([[3, 0, 0], [3, 3, 3], [1, -1, 1], [1, 2, 4], [0, 0, 6]]) / 6
_OUTPUTS = np.array([[1, 1, 1, 1, 0], [0, 1, -1, 2, 0], [0, 1, 1, 4, 1]])
# F(2, 2)'s transform of the kernel; `_points` has that of the inputs.
_KERNEL_OF_2 = np.array([[1, 0], [1, 1], [0, 1]])

# 3×3: the transforms are dense over the whole map, and on larger ones cost more than they save.
_LARGEST_SIDE = 7
# 4×4: what products save grows with the square of the channels, what transforms cost does not.
_FEWEST_CHANNELS = 96
# With fewer images the kernel's transform does.
_FEWEST_IMAGES = 16

_ALLOWED: contextvars.ContextVar[bool] = contextvars.ContextVar("allowed", default=False)


@contextlib.contextmanager
def allowed(on: bool):
    """Within it, convolutions may be computed this way.

    For CPUs: accelerators have kernels of their own, and some multiply in fewer bits. So what is
    exported holds plain convolutions.
    """
    token = _ALLOWED.set(on)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def chosen(inputs: tf.Tensor, width: int, stride: int) -> typing.Callable | None:
    """The function that is to compute a convolution of width × width here; None for a plain one."""
    images, height, across, channels = inputs.shape
    enough = images is None or images >= _FEWEST_IMAGES
    square = height is not None and height == across
    if not (_ALLOWED.get() and enough and square and inputs.dtype == tf.float32):
        return None
    if (width, stride) == (3, 1) and height <= _LARGEST_SIDE:
        return of_width_3
    if (width, stride) == (4, 2) and height % 4 == 2 and channels >= _FEWEST_CHANNELS:
        return of_width_4
    return None


def of_width_3(inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """A 3×3 convolution of stride 1 without padding.

    Args:
        inputs: [N, H, H, C].
        kernel: [3, 3, C, K].

    Returns:
        [N, H − 2, H − 2, K].
    """
    _, H, _, C = inputs.shape
    out, K = H - 2, kernel.shape[-1]
    of_inputs, of_kernel, of_outputs = (tf.constant(m, inputs.dtype) for m in _matrices(H))
    tiles = of_inputs.shape[0] // _POINTS**2  # on both axes
    pixels = tf.transpose(tf.reshape(inputs, [-1, H * H, C]), [1, 0, 2])  # [H², N, C]
    values = tf.matmul(of_inputs, tf.reshape(pixels, [H * H, -1]))  # [25·tiles, N·C]
    values = tf.reshape(values, [_POINTS**2, -1, C])  # [25, tiles·N, C]
    weights = tf.matmul(of_kernel, tf.reshape(kernel, [-1, C * K]))  # [25, C·K]
    products = tf.matmul(values, tf.reshape(weights, [-1, C, K]))  # [25, tiles·N, K]
    products = tf.reshape(products, [_POINTS**2 * tiles, -1])  # [25·tiles, N·K]
    outputs = tf.matmul(of_outputs, products)  # [(H − 2)², N·K]
    outputs = tf.transpose(tf.reshape(outputs, [out * out, -1, K]), [1, 0, 2])  # [N, (H − 2)², K]
    return tf.reshape(outputs, [-1, out, out, K])


def of_width_4(inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """A 4×4 convolution of stride 2 without padding.

    Rows and columns come first and are taken apart and put together again: that costs less than
    products with sparse matrices, forwards and backwards.

    Args:
        inputs: [N, H, H, C]; H is even, and so is the number of rows of outputs, H / 2 − 1 = 2·t.
        kernel: [4, 4, C, K].

    Returns:
        [N, H / 2 − 1, H / 2 − 1, K].
    """
    _, H, _, C = inputs.shape
    patches, K = H // 2, kernel.shape[-1]
    t = (patches - 1) // 2  # tiles of two outputs along an axis
    weights = tf.transpose(tf.reshape(kernel, [2, 2, 2, 2, C, K]), [0, 2, 1, 3, 4, 5])
    of_kernel = np.einsum("ph,qw->pqhw", _KERNEL_OF_2, _KERNEL_OF_2).reshape(9, 4)
    weights = tf.matmul(tf.constant(of_kernel, kernel.dtype), tf.reshape(weights, [4, -1]))
    pixels = tf.reshape(inputs, [-1, patches, 2, patches, 2, C])
    pixels = tf.transpose(pixels, [1, 3, 0, 2, 4, 5])  # [H / 2, H / 2, N, 2, 2, C]
    pixels = tf.reshape(pixels, [patches, patches, -1, 4 * C])
    values = []  # of 3·3 points and t columns of tiles: [t, N, 4·C], by rows of tiles
    for rows in _points(tf.unstack(pixels)):
        columns = tf.unstack(tf.stack(rows), axis=1)  # H / 2 of [t, N, 4·C]
        values += [column for point in _points(columns) for column in point]
    products = tf.matmul(
        tf.reshape(tf.stack(values), [9, -1, 4 * C]), tf.reshape(weights, [9, 4 * C, K])
    )  # [9, t·t·N, K]
    parts = tf.unstack(tf.reshape(products, [9, -1]))
    # Even and odd columns of outputs, of three points along rows.
    columns = [(p + q, q + r) for p, q, r in (parts[:3], parts[3:6], parts[6:])]
    outputs = [a + b for pair in itertools.pairwise(columns) for a, b in zip(*pair, strict=True)]
    outputs = tf.reshape(tf.stack(outputs), [2, 2, t, t, -1, K])  # even and odd, then tiles
    outputs = tf.transpose(outputs, [4, 3, 0, 2, 1, 5])  # [N, t, 2, t, 2, K]
    return tf.reshape(outputs, [-1, 2 * t, 2 * t, K])


def _points(along: list[tf.Tensor]) -> tuple[list[tf.Tensor], ...]:
    """Of 2·t + 1 inputs along an axis: what t tiles of inputs a, b, c have at three points."""
    first, middle, last = along[:-1:2], along[1::2], along[2::2]
    return (
        [a - b for a, b in zip(first, middle, strict=True)],
        middle,
        [c - b for b, c in zip(middle, last, strict=True)],
    )


@functools.cache
def _matrices(side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the inputs [25·tiles, H²], the kernel [25, 9] and the outputs [(H − 2)², 25·tiles].

    The tiles lie side by side; what the last ones have beyond the map is zero, and left out.
    """
    outputs = side - 2
    along_axis = -(-outputs // _TILE)
    of_inputs = np.zeros([_POINTS, along_axis, side])
    of_outputs = np.zeros([outputs, _POINTS, along_axis])
    for tile in range(along_axis):
        begin = tile * _TILE
        inside, made = min(_POINTS, side - begin), min(_TILE, outputs - begin)
        of_inputs[:, tile, begin : begin + inside] = _INPUTS[:, :inside]
        of_outputs[begin : begin + made, :, tile] = _OUTPUTS[:made]
    # Both axes: points before tiles.
    of_inputs = np.einsum("pth,qsw->pqtshw", of_inputs, of_inputs)
    of_kernel = np.einsum("ph,qw->pqhw", _KERNEL, _KERNEL)
    of_outputs = np.einsum("ypt,xqs->yxpqts", of_outputs, of_outputs)
    return (
        of_inputs.reshape(-1, side**2),
        of_kernel.reshape(_POINTS**2, -1),
        of_outputs.reshape(outputs**2, -1),
    )
