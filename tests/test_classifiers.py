"""The evaluation classifiers and their loss."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from amdim_tf.classifiers import LinearClassifier, MLPClassifier, classification_loss


def test_loss_by_hand():
    logits = np.array([[1.0, 2.0, -1.0], [30.0, 0.0, 0.0]])
    labels = np.array([1, 2])
    clipped = 10 * np.tanh(logits / 10)
    losses = np.log(np.exp(clipped).sum(axis=1)) - clipped[[0, 1], labels]
    expected = losses.mean() + 1e-3 * (logits**2).mean()
    loss, correct, labelled = classification_loss(tf.constant(logits), tf.constant(labels))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert (float(correct), float(labelled)) == (1, 2)


def test_unlabelled_images_do_not_count():
    rng = np.random.default_rng(0)
    logits = tf.Variable(rng.standard_normal([5, 3]).astype(np.float32))
    labels = tf.constant([0, -1, 2, -1, 1])
    with tf.GradientTape() as tape:
        loss, _, labelled = classification_loss(logits, labels)
    gradient = tape.gradient(loss, logits).numpy()
    known = [0, 2, 4]
    alone, _, _ = classification_loss(tf.gather(logits, known), tf.gather(labels, known))
    np.testing.assert_allclose(loss, alone, rtol=1e-6)
    assert float(labelled) == 3
    assert not gradient[[1, 3]].any()
    assert gradient[known].all()


def test_no_label_at_all():
    loss, correct, labelled = classification_loss(tf.ones([2, 3]), tf.constant([-1, -1]))
    assert (float(loss), float(correct), float(labelled)) == (0, 0, 0)


def test_dropout_follows_the_noise():
    mlp = MLPClassifier(3, hidden=4, dropout=0.5)
    features = tf.random.stateless_normal([6, 5], seed=[0, 1])
    all_kept = mlp(features, noise=tf.ones([6, 9]), training=True)
    np.testing.assert_allclose(all_kept, mlp(features, noise=tf.ones([6, 9]), training=True))
    all_dropped = mlp(features, noise=tf.zeros([6, 9]), training=True)
    np.testing.assert_allclose(all_dropped, tf.tile(mlp.dense2.bias.value[None], [6, 1]))
    some = mlp(features, noise=tf.random.stateless_uniform([6, 9], seed=[0, 2]), training=True)
    assert np.abs(some - all_kept).max() > 1e-3


@pytest.mark.parametrize("layer", [LinearClassifier(7), MLPClassifier(7, hidden=8, dropout=0.1)])
def test_config_round_trip(layer):
    copy = keras.layers.deserialize(keras.layers.serialize(layer))
    assert copy.get_config() == layer.get_config()
    assert copy(tf.zeros([2, 3])).shape == (2, 7)
