"""3×3 convolutions of small maps with fewer multiplications (Winograd's minimal filtering).

Lavin and Gray, arXiv 1509.09308, section 4: F(3×3, 3×3) takes 25 multiplications for nine outputs
instead of 81. The numbers are those of the convolution up to rounding, which in float32 is about
twice that of a convolution kernel; in half precision it would matter.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools

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

# The transforms are dense over the whole map: on larger ones they cost more than they save. So does
# the kernel's for fewer images.
_LARGEST_SIDE = 7
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


def applies(inputs: tf.Tensor, width: int, stride: int) -> bool:
    """Whether a convolution of width × width is to be computed by `convolve`."""
    if not _ALLOWED.get() or (width, stride) != (3, 1) or inputs.dtype != tf.float32:
        return False
    images, height, across, _ = inputs.shape
    enough = images is None or images >= _FEWEST_IMAGES
    return enough and height == across and height is not None and height <= _LARGEST_SIDE


def convolve(inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
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
