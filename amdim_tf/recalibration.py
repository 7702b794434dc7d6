"""Batch-norm statistics measured anew on training images.

The running statistics of a checkpoint follow augmented views. Features are taken from evaluation
views, whose statistics differ a little; these can be measured before features are extracted. Test
images have no part in it: the reference refreshed its statistics on them.
"""

from __future__ import annotations

from amdim_tf import input_pipeline
from amdim_tf.blocks import BatchNorm
from amdim_tf.config import Config
from amdim_tf.errors import UserError
from amdim_tf.examples import Source
from amdim_tf.model import AMDIM
from amdim_tf.progress import Progress

_BATCH = 250


def recalibrate(model: AMDIM, source: Source, config: Config, images: int) -> None:
    """Replaces the encoder's running statistics by the mean of those of whole batches.

    Args:
        model: its encoder's statistics are changed.
        source: training images, taken in order; labels are not used.
        config: the evaluation view's settings.
        images: how many, rounded down to whole batches.
    """
    batch = min(_BATCH, len(source))
    batches = min(images, len(source)) // batch
    if not batches:
        raise UserError(
            f"--recalibrate_batch_norm: expected at least {batch} images, one batch. "
            f"Received: {images}."
        )
    layers = [layer for layer in model.encoder._flatten_layers() if isinstance(layer, BatchNorm)]
    momenta = [layer.momentum for layer in layers]
    views = input_pipeline.evaluation_batches(source, config, batch).take(batches)
    try:
        with Progress(batches * batch, "batch-norm statistics", "image") as progress:
            for number, (view, _) in enumerate(views):
                for layer in layers:  # the mean of all batches so far
                    layer.momentum = number / (number + 1)
                model.encoder(view, training=True)
                progress.advance(batch)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
