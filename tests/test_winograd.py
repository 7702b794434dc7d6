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


def _operands(side, channels=8, filters=6, images=3, dtype=tf.float64):
    scale = 1 / np.sqrt(9 * channels)
    inputs = tf.random.stateless_normal([images, side, side, channels], [0, side], dtype=dtype)
    kernel = tf.random.stateless_normal([3, 3, channels, filters], [1, side], dtype=dtype) * scale
    return inputs, tf.cast(kernel, dtype)


def _plain(inputs, kernel):
    return tf.nn.conv2d(inputs, kernel, 1, "VALID")


@pytest.mark.parametrize("side", range(3, 10))
def test_equals_the_convolution_and_its_gradients(side):
    operands = _operands(side)
    found = []
    for function in (winograd.convolve, _plain):
        with tf.GradientTape() as tape:
            tape.watch(operands)
            outputs = function(*operands)
            weighted = tf.reduce_sum(outputs * tf.cos(outputs))
        found.append((outputs, *tape.gradient(weighted, operands)))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", [5, 7])
def test_rounding_is_that_of_float32(side):
    inputs, kernel = _operands(side, channels=512, filters=64)  # outputs are about 1
    exact = _plain(inputs, kernel)
    ours = winograd.convolve(tf.cast(inputs, tf.float32), tf.cast(kernel, tf.float32))
    errors = tf.abs(tf.cast(ours, tf.float64) - exact)
    assert tf.sqrt(tf.reduce_mean(errors**2)) < 1e-5
    assert tf.reduce_max(errors) < 1e-4


def test_any_number_of_images():
    inputs, kernel = _operands(5, images=4)
    traced = tf.function(winograd.convolve, input_signature=[
        tf.TensorSpec([None, 5, 5, 8], tf.float64), tf.TensorSpec(kernel.shape, tf.float64)
    ])  # fmt: skip
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
    "images, side, width, stride, dtype, allowed, applies",
    [
        (16, 7, 3, 1, "float32", True, True),
        (None, 5, 3, 1, "float32", True, True),
        (16, 7, 3, 1, "float32", False, False),
        (15, 7, 3, 1, "float32", True, False),
        (16, 8, 3, 1, "float32", True, False),
        (16, None, 3, 1, "float32", True, False),
        (16, 7, 3, 2, "float32", True, False),
        (16, 7, 2, 1, "float32", True, False),
        (16, None, 2, 2, "float32", True, False),
        (16, 7, 3, 1, "bfloat16", True, False),
    ],
)
def test_where_it_is_used(images, side, width, stride, dtype, allowed, applies):
    layer = Convolution(4, width, stride, use_bias=False, dtype=dtype)
    found = _operations(layer, [images, side, side, 3], dtype, allowed)
    assert ("BatchMatMulV2" in found, "Conv2D" in found) == (applies, not applies)


def test_what_is_allowed_ends_with_its_block():
    inputs = tf.zeros([16, 7, 7, 3])
    with pytest.raises(KeyError), winograd.allowed(True):
        assert winograd.applies(inputs, 3, 1)
        with winograd.allowed(False):
            assert not winograd.applies(inputs, 3, 1)
        raise KeyError
    assert not winograd.applies(inputs, 3, 1)


def _plain_convolutions(function, *arguments) -> int:
    graph = function.get_concrete_function(*arguments).graph
    return sum(operation.type == "Conv2D" for operation in graph.get_operations())


def test_evaluation_and_training_use_it_and_exports_and_xla_do_not():
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
    # Of the encoder's 3×3 convolutions two are on maps of 7×7 and 5×5. What is left: the stem and
    # the 4×4 one, in each of two halves or views.
    assert _plain_convolutions(features.f1_of(model), images) == 4
    assert in_a_pass("off") == 4
    assert in_a_pass("on") == 4
    assert _plain_convolutions(exported, pictures) == 4
