"""The encoder for images of 32, 64 and 128 pixels (paper section 3.6 and its Figure 1c)."""

from __future__ import annotations

import keras
import tensorflow as tf

from amdim_tf.blocks import BatchNorm, Convolution, ResidualBlock, ResidualLayer, fan_in_uniform
from amdim_tf.config import ENCODER_SIZES, top_channels


def _stem_convolution(filters, kernel_size, strides, channels, name):
    """A convolution with bias and ReLU on `channels` inputs."""
    return Convolution(
        filters,
        kernel_size,
        strides,
        activation="relu",
        kernel_initializer=fan_in_uniform(),
        bias_initializer=fan_in_uniform(kernel_size**2 * channels),
        name=name,
    )


@keras.saving.register_keras_serializable("amdim_tf")
class Encoder(keras.layers.Layer):
    """Images to f7, f5 and f1, the top-most activations of each spatial size.

    `stages` are the parts in order. Reading them top to bottom gives the table of the paper's
    Figure 1c; no stage pads, except for the reflection before the first convolution of size 128.

    Args:
        image_size: 32, 64 or 128.
        ndf: channels of the first stage.
        n_rkhs: channels D of f1.
        n_depth: residual layers in each block.
        use_bn: batch normalization in the residual layers and after the 7×7 block.

    Shapes: [N, S, S, 3] -> {"f7": [N, 7, 7, C], "f5": [N, 5, 5, C], "f1": [N, D]}.
    """

    def __init__(self, image_size, ndf, n_rkhs, n_depth, use_bn=False, **kwargs):
        super().__init__(**kwargs)
        if image_size not in ENCODER_SIZES:
            raise ValueError(
                f"Encoder has the image sizes {ENCODER_SIZES}. Received: image_size={image_size}."
            )
        self.image_size = image_size
        self.ndf = ndf
        self.n_rkhs = n_rkhs
        self.n_depth = n_depth
        self.use_bn = use_bn

        def block(name, filters, kernel_size, strides):
            return ResidualBlock(filters, kernel_size, strides, n_depth, use_bn, name=name)

        if image_size == 32:
            stem = [
                _stem_convolution(ndf, 3, 1, 3, "stem"),  # 30
                ResidualLayer(ndf, 1, 1, use_bn, name="stem_residual"),  # 30
                block("block_14", 2 * ndf, 4, 2),  # 14
                block("block_7", 4 * ndf, 2, 2),  # 7
            ]
        else:
            first = [_stem_convolution(ndf, 3, 1, 3, "stem")]  # 62
            if image_size == 128:
                first = [
                    _stem_convolution(ndf, 5, 2, 3, "stem"),  # 132 after padding -> 64
                    _stem_convolution(ndf, 3, 1, ndf, "stem_2"),  # 62
                ]
            stem = [
                *first,
                block("block_30", 2 * ndf, 4, 2),  # 30
                block("block_14", 4 * ndf, 4, 2),  # 14
                block("block_7", 8 * ndf, 2, 2),  # 7
            ]
        channels = top_channels(image_size, ndf)
        self.stages = [
            *stem,
            *([BatchNorm(name="norm_7")] if use_bn else []),
            block("block_5", channels, 3, 1),  # 5
            block("block_3", channels, 3, 1),  # 3
            ResidualLayer(n_rkhs, 3, 1, use_bn, name="top"),  # 1
            BatchNorm(name="norm_1"),
        ]

    def build(self, input_shape):
        """Builds every stage for the encoder's own image size."""
        side = self.image_size + 4 if self.image_size == 128 else self.image_size
        shape = (None, side, side, 3)
        self._sides = []
        for stage in self.stages:
            stage.build(shape)
            shape = stage.compute_output_shape(shape)
            self._sides.append(shape[1])

    def call(self, images, training=False, groups=1):
        """Runs the stages and keeps the last activation of each size 7, 5 and 1.

        Args:
            images: normalized images [N, S, S, 3].
            training: normalize by batch statistics.
            groups: how many consecutive groups (views) have statistics of their own.
        """
        if self.image_size == 128:
            images = tf.pad(images, [[0, 0], [2, 2], [2, 2], [0, 0]], mode="REFLECT")
        maps = {}
        hidden = images
        for stage in self.stages:
            if isinstance(stage, Convolution):
                hidden = stage(hidden)
            else:
                hidden = stage(hidden, training=training, groups=groups)
            maps[hidden.shape[1]] = hidden
        f1 = tf.squeeze(maps[1], axis=[1, 2])  # [N, D]
        return {"f7": maps[7], "f5": maps[5], "f1": f1}

    def variables_beyond(self, side: int):
        """Trainable variables of the stages whose maps are smaller than side × side."""
        return [
            variable
            for stage, its_side in zip(self.stages, self._sides, strict=True)
            if its_side < side
            for variable in stage.trainable_variables
        ]

    def compute_output_shape(self, input_shape):
        """Shapes of the three outputs."""
        batch, channels = input_shape[0], top_channels(self.image_size, self.ndf)
        return {
            "f7": (batch, 7, 7, channels),
            "f5": (batch, 5, 5, channels),
            "f1": (batch, self.n_rkhs),
        }

    def get_config(self):
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "image_size": self.image_size,
            "ndf": self.ndf,
            "n_rkhs": self.n_rkhs,
            "n_depth": self.n_depth,
            "use_bn": self.use_bn,
        }
