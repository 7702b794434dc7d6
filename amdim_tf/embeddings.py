"""The embedding functions φ5 and φ7 (paper sections 3.3 and 3.6); φ1 is the identity."""

from __future__ import annotations

import keras
import tensorflow as tf

from amdim_tf.blocks import BatchNorm, Convolution, convolution, fan_in_uniform


@keras.saving.register_keras_serializable("amdim_tf")
class NearIdentity(keras.initializers.Initializer):
    """Uniform within ±0.01, with ones on the diagonal of the last two axes."""

    def __call__(self, shape, dtype=None):
        """A kernel [1, 1, in, out]."""
        noise = keras.random.uniform(shape, -0.01, 0.01, dtype=dtype)
        eye = keras.ops.eye(shape[-2], shape[-1], dtype=dtype)
        return noise * (1 - eye) + eye


@keras.saving.register_keras_serializable("amdim_tf")
class Embedding(keras.layers.Layer):
    """A small network applied at every location of a feature map.

    1×1 convolution → [batch norm] → ReLU → 1×1 convolution that starts at zero, plus a 1×1
    shortcut that starts near the identity, then batch norm always.

    Args:
        n_rkhs: channels D of the embedding.
        use_bn: normalize the hidden layer too.

    Shapes: [N, H, W, C] -> [N, H, W, n_rkhs].
    """

    def __init__(self, n_rkhs, use_bn=False, **kwargs):
        super().__init__(**kwargs)
        self.n_rkhs = n_rkhs
        self.use_bn = use_bn
        self.conv1 = convolution(n_rkhs, 1, name="conv1")
        self.norm_hidden = BatchNorm(name="norm_hidden") if use_bn else None
        self.conv2 = convolution(n_rkhs, 1, zeros=True, name="conv2")
        self.norm_out = BatchNorm(name="norm_out")

    def build(self, input_shape):
        """Creates the weights; the shortcut's bias depends on the input channels."""
        hidden_shape = (*input_shape[:-1], self.n_rkhs)
        self.conv1.build(input_shape)
        if self.norm_hidden is not None:
            self.norm_hidden.build(hidden_shape)
        self.conv2.build(hidden_shape)
        self.shortcut = Convolution(
            self.n_rkhs,
            1,
            kernel_initializer=NearIdentity(),
            bias_initializer=fan_in_uniform(input_shape[-1]),
            name="shortcut",
            dtype=self.dtype_policy,
        )
        self.shortcut.build(input_shape)
        self.norm_out.build(hidden_shape)

    def call(self, inputs, training=False, groups=1):
        """Embeds each location."""
        hidden = self.conv1(inputs)  # [N, H, W, D]
        if self.norm_hidden is not None:
            hidden = self.norm_hidden(hidden, training=training, groups=groups)
        embedded = self.conv2(tf.nn.relu(hidden)) + self.shortcut(inputs)  # [N, H, W, D]
        return self.norm_out(embedded, training=training, groups=groups)

    def get_config(self):
        """The constructor's arguments."""
        return {**super().get_config(), "n_rkhs": self.n_rkhs, "use_bn": self.use_bn}
