"""The embedding layer: start, values by hand, config round trip."""

import keras
import numpy as np
import tensorflow as tf

from amdim_tf.embeddings import Embedding, NearIdentity


def test_starts_near_the_identity():
    kernel = NearIdentity()((1, 1, 6, 8), "float32").numpy()[0, 0]
    np.testing.assert_array_equal(np.diag(kernel), 1)
    off_diagonal = kernel[~np.eye(6, 8, dtype=bool)]
    assert 0.005 < np.abs(off_diagonal).max() <= 0.01
    embedding = Embedding(8)
    embedding.build((None, 5, 5, 6))
    assert not embedding.conv2.kernel.numpy().any()
    assert np.abs(embedding.shortcut.bias.numpy()).max() <= 6**-0.5


def test_by_hand():
    embedding = Embedding(1)
    embedding.build((None, 1, 1, 1))
    embedding.conv1.kernel.assign([[[[2.0]]]])
    embedding.conv2.kernel.assign([[[[3.0]]]])
    embedding.shortcut.kernel.assign([[[[5.0]]]])
    embedding.shortcut.bias.assign([1.0])
    outputs = embedding(tf.constant([1.0, -1.0], shape=[2, 1, 1, 1]))
    # relu(2x)·3 + 5x + 1, then the inference batch norm with mean 0, variance 1.
    expected = np.array([12.0, -4.0]) / np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(np.ravel(outputs), expected, rtol=1e-5)


def test_every_location_is_embedded_alike():
    embedding = Embedding(8, use_bn=True)
    images = tf.random.stateless_normal([2, 7, 7, 6], seed=[0, 1])
    outputs = embedding(images)
    assert outputs.shape == (2, 7, 7, 8)
    alone = embedding(images[:, 3:4, 2:3])
    np.testing.assert_allclose(outputs[:, 3, 2], alone[:, 0, 0], rtol=1e-4, atol=1e-5)


def test_config_round_trip():
    embedding = Embedding(8, use_bn=True)
    copy = keras.layers.deserialize(keras.layers.serialize(embedding))
    assert copy.get_config() == embedding.get_config()
