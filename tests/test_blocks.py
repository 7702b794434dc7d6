"""Residual layers and batch norm: basics, bad arguments, values by hand, config round trips."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from amdim_tf.blocks import BatchNorm, Convolution, ResidualBlock, ResidualLayer


def test_residual_layer_by_hand():
    layer = ResidualLayer(2, kernel_size=2, strides=2)
    layer.build((None, 2, 2, 1))
    layer.conv1.kernel.assign(np.array([1.0, -1.0] * 4).reshape(2, 2, 1, 2))
    layer.conv2.kernel.assign(np.array([[10.0, 1.0], [100.0, 1.0]]).reshape(1, 1, 2, 2))
    image = tf.constant([1.0, 2.0, 3.0, 4.0], shape=[1, 2, 2, 1])
    # conv1: (10, −10), ReLU: (10, 0), conv2: (100, 10); base: mean 2.5, padded with a zero channel.
    np.testing.assert_allclose(layer(image)[0, 0, 0], [102.5, 10.0])


def test_residual_layer_starts_as_pooling():
    layer = ResidualLayer(3, kernel_size=3, strides=1)
    images = tf.random.stateless_normal([2, 7, 7, 3], seed=[0, 1])
    np.testing.assert_allclose(
        layer(images), tf.nn.avg_pool2d(images, 3, 1, "VALID"), rtol=1e-5, atol=1e-6
    )


def test_residual_layer_cannot_drop_channels():
    with pytest.raises(ValueError, match="at most 2 input channels"):
        ResidualLayer(2)(tf.zeros([1, 4, 4, 3]))


def test_block_shrinks_once():
    block = ResidualBlock(8, 4, 2, depth=3)
    assert block(tf.zeros([2, 14, 14, 4])).shape == (2, 6, 6, 8)
    assert len(block.layers) == 3
    assert block.compute_output_shape((2, 14, 14, 4)) == (2, 6, 6, 8)


def _normalized(values, epsilon=1e-5):
    return (values - values.mean(axis=(0, 1, 2))) / np.sqrt(values.var(axis=(0, 1, 2)) + epsilon)


def test_batch_norm_normalizes_each_group_by_itself():
    rng = np.random.default_rng(0)
    first = rng.normal(3, 2, [4, 5, 5, 3]).astype(np.float32)
    second = rng.normal(-1, 4, [4, 5, 5, 3]).astype(np.float32)
    norm = BatchNorm()
    outputs = norm(np.concatenate([first, second]), training=True, groups=2)
    np.testing.assert_allclose(outputs[:4], _normalized(first), atol=1e-4)
    np.testing.assert_allclose(outputs[4:], _normalized(second), atol=1e-4)
    # The running statistics move by each group in turn, the variance by its unbiased estimate.
    mean, variance = np.zeros(3), np.ones(3)
    for group in (first, second):
        mean = 0.9 * mean + 0.1 * group.mean(axis=(0, 1, 2))
        variance = 0.9 * variance + 0.1 * group.var(axis=(0, 1, 2), ddof=1)
    np.testing.assert_allclose(norm.moving_mean, mean, rtol=1e-4)
    np.testing.assert_allclose(norm.moving_variance, variance, rtol=1e-4)


def test_batch_norm_uses_running_statistics_in_inference():
    norm = BatchNorm()
    norm.build((None, 2))
    norm.moving_mean.assign([1.0, 2.0])
    norm.moving_variance.assign([4.0, 9.0])
    norm.gamma.assign([1.0, 3.0])
    norm.beta.assign([0.0, 1.0])
    np.testing.assert_allclose(norm(tf.constant([[3.0, 5.0]])), [[1.0, 4.0]], rtol=1e-5)
    np.testing.assert_allclose(norm.moving_mean, [1.0, 2.0])


@pytest.mark.parametrize(
    "layer",
    [
        BatchNorm(momentum=0.8, epsilon=1e-3),
        ResidualLayer(4, 3, 2, use_bn=True),
        ResidualBlock(4, 3, 2, depth=2, use_bn=True),
    ],
)
def test_config_round_trip(layer):
    copy = keras.layers.deserialize(keras.layers.serialize(layer))
    assert type(copy) is type(layer)
    assert copy.get_config() == layer.get_config()


@pytest.mark.parametrize(
    "kernel_size, strides, side", [(1, 1, 5), (3, 1, 3), (3, 1, 5), (4, 2, 8), (2, 2, 6), (2, 2, 7)]
)
def test_convolution_equals_tensorflows(kernel_size, strides, side):
    images = tf.random.stateless_normal([2, side, side, 3], seed=[0, 1])
    layer = Convolution(4, kernel_size, strides, use_bias=True, bias_initializer="ones")
    expected = tf.nn.conv2d(images, layer_kernel(layer, images), strides, "VALID") + 1.0
    np.testing.assert_allclose(layer(images), expected, rtol=1e-4, atol=1e-5)
    assert layer.compute_output_shape(images.shape) == tuple(expected.shape)


def layer_kernel(layer, images):
    """The kernel of a layer that is built for these images."""
    layer.build(images.shape)
    return layer.kernel.value
