"""Convolutions by fewer multiplications against TensorFlow's own."""

import numpy as np
import pytest
import tensorflow as tf

from amdim_tf import (
    checkpoints,
    distribution,
    features,
    serving,
    training_loop,
    winograd,
)
from amdim_tf import config as config_lib
from amdim_tf.blocks import Convolution

# Each way: what computes it, and what it is.
WAYS = {3: (winograd.of_width_3, 1), 4: (winograd.of_width_4, 2)}


def _operands(width, side, channels=8, filters=6, images=3):
    scale = 1 / np.sqrt(width * width * channels)  # outputs are about 1
    inputs = tf.random.stateless_normal([images, side, side, channels], [0, side], dtype=tf.float64)
    kernel = tf.random.stateless_normal(
        [width, width, channels, filters], [1, side], dtype=tf.float64
    )
    return inputs, kernel * scale


def _plain(inputs, kernel):
    return tf.nn.conv2d(inputs, kernel, WAYS[kernel.shape[0]][1], "VALID")


@pytest.mark.parametrize(
    "width, side", [*((3, side) for side in range(3, 10)), (4, 6), (4, 10), (4, 14), (4, 30)]
)
def test_equals_the_convolution_and_its_gradients(width, side):
    operands = _operands(width, side)
    found = []
    for function in (WAYS[width][0], _plain):
        with tf.GradientTape() as tape:
            tape.watch(operands)
            outputs = function(*operands)
            weighted = tf.reduce_sum(outputs * tf.cos(outputs))
        found.append((outputs, *tape.gradient(weighted, operands)))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("width, side, channels", [(3, 5, 512), (3, 7, 512), (4, 30, 128)])
def test_rounding_is_that_of_float32(width, side, channels):
    inputs, kernel = _operands(width, side, channels, filters=64)
    exact = _plain(inputs, kernel)
    ours = WAYS[width][0](tf.cast(inputs, tf.float32), tf.cast(kernel, tf.float32))
    errors = tf.abs(tf.cast(ours, tf.float64) - exact)
    assert tf.sqrt(tf.reduce_mean(errors**2)) < 1e-5
    assert tf.reduce_max(errors) < 1e-4


@pytest.mark.parametrize("width, side", [(3, 5), (4, 10)])
def test_any_number_of_images(width, side):
    inputs, kernel = _operands(width, side, images=4)
    specs = [
        tf.TensorSpec(shape, tf.float64) for shape in ([None, *inputs.shape[1:]], kernel.shape)
    ]
    traced = tf.function(WAYS[width][0], input_signature=specs)
    for count in (0, 1, 4):
        expected = _plain(inputs, kernel)[:count]
        np.testing.assert_allclose(traced(inputs[:count], kernel), expected, atol=1e-12)


def _operations(layer, shape, dtype, allowed):
    """Names of the operations that a layer consists of."""

    @tf.function
    def call(inputs):
        with winograd.allowed(allowed):
            return layer(inputs)

    graph = call.get_concrete_function(tf.TensorSpec(shape, dtype)).graph
    return {operation.type for operation in graph.get_operations()}


@pytest.mark.parametrize(
    "images, side, channels, width, stride, dtype, allowed, applies",
    [
        (16, 7, 3, 3, 1, "float32", True, True),
        (None, 5, 3, 3, 1, "float32", True, True),
        (16, 7, 3, 3, 1, "float32", False, False),
        (15, 7, 3, 3, 1, "float32", True, False),
        (16, 8, 3, 3, 1, "float32", True, False),
        (16, None, 3, 3, 1, "float32", True, False),
        (16, 7, 3, 3, 2, "float32", True, False),
        (16, 7, 3, 2, 1, "float32", True, False),
        (16, None, 3, 2, 2, "float32", True, False),
        (16, 7, 3, 3, 1, "bfloat16", True, False),
        (16, 30, 96, 4, 2, "float32", True, True),
        (None, 6, 96, 4, 2, "float32", True, True),
        (16, 30, 96, 4, 2, "float32", False, False),
        (15, 30, 96, 4, 2, "float32", True, False),
        (16, 30, 95, 4, 2, "float32", True, False),
        (16, 28, 96, 4, 2, "float32", True, False),
        (16, 31, 96, 4, 2, "float32", True, False),
        (16, 30, 96, 4, 1, "float32", True, False),
        (16, 30, 96, 4, 2, "bfloat16", True, False),
    ],
)
def test_where_it_is_used(images, side, channels, width, stride, dtype, allowed, applies):
    layer = Convolution(4, width, stride, use_bias=False, dtype=dtype)
    found = _operations(layer, [images, side, side, channels], dtype, allowed)
    assert ("BatchMatMulV2" in found, "Conv2D" in found) == (applies, not applies)


def test_only_square_maps():
    with winograd.allowed(True):
        assert not winograd.chosen(tf.zeros([16, 7, 5, 3]), 3, 1)
        assert not winograd.chosen(tf.zeros([16, 6, 10, 96]), 4, 2)


def test_what_is_allowed_ends_with_its_block():
    inputs = tf.zeros([16, 7, 7, 3])
    with pytest.raises(KeyError), winograd.allowed(True):
        assert winograd.chosen(inputs, 3, 1)
        with winograd.allowed(False):
            assert not winograd.chosen(inputs, 3, 1)
        raise KeyError
    assert not winograd.chosen(inputs, 3, 1)


def _plain_convolutions(function, *arguments) -> int:
    graph = function.get_concrete_function(*arguments).graph
    return sum(operation.type == "Conv2D" for operation in graph.get_operations())


def test_evaluation_and_training_use_it_and_exports_and_xla_do_not(monkeypatch):
    monkeypatch.setattr(winograd, "_FEWEST_CHANNELS", 4)
    settings = {"dataset": "scenes", "ndf": 4, "n_rkhs": 16, "n_depth": 1, "batch_size": 16}
    images = tf.zeros([32, 32, 32, 3])
    noise, labels = tf.zeros([16, 16 + 1024]), tf.zeros([16], tf.int32)
    batch = {"view1": images[:16], "view2": images[16:], "label": labels, "noise": (noise, noise)}

    def in_a_pass(xla):
        config = config_lib.make({**settings, "xla": xla})
        devices = distribution.resolve(config)
        step = training_loop.compiled_model(config, 3, 10, devices).training_step
        # A pass that XLA compiles has both views as one batch.
        return _plain_convolutions(tf.function(step.forward), batch, tf.constant(32.0))

    model = checkpoints.build_model(config_lib.make(settings), 3)
    pictures = tf.TensorSpec([None, None, None, 3], tf.uint8)
    exported = tf.function(serving.signatures(model)["serving_default"].python_function)
    # Two of 3×3, on maps of 7×7 and 5×5, and one of 4×4. What is left: the stem, in each of two
    # halves or views.
    assert _plain_convolutions(features.f1_of(model), images) == 2
    assert in_a_pass("off") == 2
    assert in_a_pass("on") == 4
    assert _plain_convolutions(exported, pictures) == 4
