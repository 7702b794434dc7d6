"""The evaluation classifiers on f1 (paper section 4), and their loss."""

from __future__ import annotations

import keras
import tensorflow as tf

from amdim_tf.blocks import BatchNorm, fan_in_uniform

LOGIT_CLIP = 10.0
LOGIT_REGULARIZATION = 1e-3


def _dense(units, inputs, use_bias=True, name=None):
    """A dense layer on `inputs` features with the reference's initialization."""
    return keras.layers.Dense(
        units,
        use_bias=use_bias,
        kernel_initializer=fan_in_uniform(),
        bias_initializer=fan_in_uniform(inputs),
        name=name,
    )


@keras.saving.register_keras_serializable("amdim_tf")
class LinearClassifier(keras.layers.Layer):
    """One dense layer. Shapes: [N, D] -> [N, classes]."""

    def __init__(self, classes, **kwargs):
        super().__init__(**kwargs)
        self.classes = classes

    def build(self, input_shape):
        """Creates the dense layer."""
        self.dense = _dense(self.classes, input_shape[-1], name="dense")
        self.dense.build(input_shape)

    def call(self, features):
        """Logits of each class."""
        return self.dense(features)

    def get_config(self):
        """The constructor's arguments."""
        return {**super().get_config(), "classes": self.classes}


@keras.saving.register_keras_serializable("amdim_tf")
class MLPClassifier(keras.layers.Layer):
    """Dropout → dense without bias → batch norm → ReLU → dropout → dense.

    The dropout noise is an argument, so that it can be a function of the run's seed, the step and
    the image's place in the global batch, and not of the device that handles it.

    Args:
        classes: how many.
        hidden: units of the hidden layer.
        dropout: share of units dropped in training.

    Shapes: [N, D] -> [N, classes].
    """

    def __init__(self, classes, hidden=1024, dropout=0.2, **kwargs):
        super().__init__(**kwargs)
        self.classes = classes
        self.hidden = hidden
        self.dropout = dropout

    def build(self, input_shape):
        """Creates both dense layers and the batch norm."""
        hidden_shape = (*input_shape[:-1], self.hidden)
        self.dense1 = _dense(self.hidden, input_shape[-1], use_bias=False, name="dense1")
        self.dense1.build(input_shape)
        self.norm = BatchNorm(name="norm")
        self.norm.build(hidden_shape)
        self.dense2 = _dense(self.classes, self.hidden, name="dense2")
        self.dense2.build(hidden_shape)

    def call(self, features, noise=None, training=False):
        """Logits of each class.

        Args:
            features: [N, D].
            noise: uniform numbers in 0..1, [N, D + hidden]; needed in training.
            training: drop units, and normalize by batch statistics.
        """
        noise_in = noise_hidden = None
        if training:
            noise_in, noise_hidden = tf.split(noise, [features.shape[-1], self.hidden], axis=-1)
        hidden = self.dense1(self._drop(features, noise_in))  # [N, hidden]
        hidden = tf.nn.relu(self.norm(hidden, training=training))  # [N, hidden]
        return self.dense2(self._drop(hidden, noise_hidden))

    def _drop(self, values, noise):
        """Inverted dropout by the given noise; None: all stay."""
        if noise is None:
            return values
        return tf.where(noise >= self.dropout, values / (1 - self.dropout), 0)

    def get_config(self):
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "classes": self.classes,
            "hidden": self.hidden,
            "dropout": self.dropout,
        }


def classification_loss(logits, labels, labelled=None):
    """Cross-entropy of softly clipped logits plus a penalty on their squares (reference).

    Args:
        logits: [N, classes].
        labels: int [N]; −1 marks an unlabelled image, which does not count.
        labelled: how many labelled images there are in all, where these are a part of a batch:
            the loss is then their share of its mean.

    Returns:
        (loss, correct, labelled): a scalar, and two float counts.
    """
    logits = tf.cast(logits, tf.float32)
    is_labelled = tf.cast(labels >= 0, tf.float32)  # [N]
    count = tf.reduce_sum(is_labelled)
    clipped = LOGIT_CLIP * tf.tanh(logits / LOGIT_CLIP)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), clipped)  # [N]
    penalties = LOGIT_REGULARIZATION * tf.reduce_mean(tf.square(logits), axis=-1)  # [N]
    whole = count if labelled is None else labelled
    loss = tf.math.divide_no_nan(tf.reduce_sum((losses + penalties) * is_labelled), whole)
    correct = tf.cast(tf.argmax(logits, -1, output_type=labels.dtype) == labels, tf.float32)
    return loss, tf.reduce_sum(correct * is_labelled), count
