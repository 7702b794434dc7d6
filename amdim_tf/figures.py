"""Figures as PNG files."""

from __future__ import annotations

import pathlib

import numpy as np
import tensorflow as tf

from amdim_tf import input_pipeline, sources, views
from amdim_tf.config import Config
from amdim_tf.errors import UserError
from amdim_tf.summaries import image_grid

FIGURES = ("views",)
# Small images are enlarged to about this many pixels, for people.
_SHOWN_SIDE = 96


def draw(names: list[str], config: Config, pairs: int, output_dir) -> None:
    """Draws the named figures into a directory.

    Args:
        names: among FIGURES.
        config: data, views and seed; its batch holds at least `pairs` images.
        pairs: how many pairs of views.
        output_dir: made if need be.
    """
    for name in names:
        if name not in FIGURES:
            raise UserError(f"--figures: expected {', '.join(FIGURES)}. Received: {name!r}.")
    picture = views_sheet(config, pairs)
    path = pathlib.Path(output_dir) / "views.png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(picture).numpy())
    except OSError as error:
        raise UserError(
            f"--output_dir: expected a directory that can be written. Received: {output_dir} "
            f"({error.strerror})."
        ) from None
    print(f"Wrote {path}.")


def views_sheet(config: Config, pairs: int) -> np.ndarray:
    """Pairs of views of the first batch, as training makes them: uint8 [H, W, 3]."""
    source = sources.load(config.data, "train")
    input_pipeline.steps_per_epoch(source, config.training.batch_size)
    batch = next(iter(input_pipeline.training_batches(source, config, 0, 1)))
    both = [
        views.denormalize(config.views, batch[view][:pairs]).numpy() for view in ("view1", "view2")
    ]
    factor = max(1, round(_SHOWN_SIDE / config.data.image_size))
    pictures = np.concatenate(both, axis=2)  # [pairs, S, 2S, 3]
    pictures = pictures.repeat(factor, axis=1).repeat(factor, axis=2)
    return image_grid(pictures, columns=max(1, 1200 // pictures.shape[2]))
