"""Arithmetic of a training step, counted from the layers' shapes.

As plain convolutions count: where winograd.py computes them, fewer multiplications are made.
"""

from __future__ import annotations

import math

import keras

from amdim_tf.blocks import ResidualBlock, ResidualLayer
from amdim_tf.config import parse_task
from amdim_tf.model import AMDIM


def _layers(model: AMDIM):
    """Every convolution or residual layer of the encoder, with the shape of its input."""
    side = model.image_size + 4 if model.image_size == 128 else model.image_size
    shape = (1, side, side, 3)
    for stage in model.encoder.stages:
        inner = shape
        for layer in stage.layers if isinstance(stage, ResidualBlock) else [stage]:
            if isinstance(layer, (keras.layers.Conv2D, ResidualLayer)):
                yield layer, inner
            inner = layer.compute_output_shape(inner)
        shape = stage.compute_output_shape(shape)


def encoder_flops(model: AMDIM) -> int:
    """Multiplications and additions of the encoder alone for one image."""
    return sum(
        (_residual_flops if isinstance(layer, ResidualLayer) else _convolution_flops)(layer, shape)
        for layer, shape in _layers(model)
    )


def forward_flops(model: AMDIM) -> int:
    """Multiplications and additions of encoder, embeddings and mixture for one view of an image.

    Only matrix products count: convolutions and dense layers.
    """
    total = encoder_flops(model)
    for scale, embedding in ((5, model.embedding5), (7, model.embedding7)):
        if scale in model.scales:
            kernels = (embedding.conv1.kernel, embedding.conv2.kernel, embedding.shortcut.kernel)
            total += sum(2 * scale * scale * _size(kernel) for kernel in kernels)
    if model.mixture is not None:
        kernels = (model.mixture.hidden.kernel, model.mixture.residuals.kernel)
        total += sum(2 * _size(kernel) for kernel in kernels)
    return total


def forward_elements(model: AMDIM) -> int:
    """Numbers in the outputs of all layers of encoder and embeddings, for one view of one image."""
    total = sum(math.prod(layer.compute_output_shape(shape)) for layer, shape in _layers(model))
    scales = [scale for scale in model.scales if scale > 1]
    return total + sum(scale * scale * model.settings.n_rkhs for scale in scales)


def step_flops(model: AMDIM, batch_size: int) -> int:
    """Multiplications and additions of one training step on `batch_size` images.

    Forward and backward of both views (the gradient costs two products for each of the forward
    pass), the scores of every task in both directions, and the online classifiers.
    """
    components = max(model.settings.mixture_components, 1)
    scores = sum(
        2 * 2 * model.settings.n_rkhs * m**2 * batch_size * (components if n == 1 else 1)
        for n, m in map(parse_task, model.settings.tasks)
    )
    classifiers = 0
    if model.classes:
        kernels = (model.linear.dense.kernel, model.mlp.dense1.kernel, model.mlp.dense2.kernel)
        classifiers = sum(2 * 2 * _size(kernel) for kernel in kernels)
    return 3 * batch_size * (2 * forward_flops(model) + scores + classifiers)


def _residual_flops(layer: ResidualLayer, shape) -> int:
    first = _convolution_flops(layer.conv1, shape)
    return first + _convolution_flops(layer.conv2, layer.conv1.compute_output_shape(shape))


def _convolution_flops(layer: keras.layers.Conv2D, shape) -> int:
    _, height, width, _ = layer.compute_output_shape(shape)
    return 2 * height * width * _size(layer.kernel)


def _size(kernel: keras.Variable) -> int:
    return math.prod(kernel.shape)
