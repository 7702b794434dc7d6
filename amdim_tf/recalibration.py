"""Batch-norm statistics measured anew on training images.

The running statistics of a checkpoint follow augmented views. Features are taken from evaluation
views, whose statistics differ a little; these can be measured before features are extracted. Test
images have no part in it: the reference refreshed its statistics on them.
"""

from __future__ import annotations

import numpy as np

from amdim_tf import examples, input_pipeline
from amdim_tf.config import Config
from amdim_tf.errors import UserError
from amdim_tf.examples import Source
from amdim_tf.model import AMDIM
from amdim_tf.progress import Progress

_BATCH = 250


def recalibrate(model: AMDIM, source: Source, config: Config, images: int, seed: int) -> int:
    """Replaces the running statistics of encoder and embeddings by the mean of those of batches.

    Args:
        model: its statistics are changed.
        source: training images; labels are not used.
        config: the evaluation view's settings.
        images: how many, rounded down to whole batches.
        seed: of the draw of these images, as folders list theirs class by class.

    Returns:
        How many images it was in the end.
    """
    batch = min(_BATCH, len(source))
    batches = min(images, len(source)) // batch
    if not batches:
        raise UserError(
            f"--recalibrate_batch_norm: expected at least {batch} images, one batch. "
            f"Received: {images}."
        )
    rows = np.random.default_rng(seed).permutation(len(source))[: batches * batch]
    drawn = examples.subset(source, rows)
    views = input_pipeline.evaluation_batches(drawn, config, batch)
    layers, done = list(model.norms().values()), 0
    momenta = [layer.momentum for layer in layers]
    try:
        with Progress(batches * batch, "batch-norm statistics", "image") as progress:
            for view, _ in views:  # the last is short where images could not be decoded
                for layer in layers:  # the mean of all batches so far, by their images
                    layer.momentum = done / (done + len(view))
                model.encode(view, training=True)
                done += len(view)
                progress.advance(len(view))
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    drawn.skipped.check()
    return done
