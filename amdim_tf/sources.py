"""Data sets by name: images, labels and class names of a split."""

from __future__ import annotations

import dataclasses

import numpy as np

from amdim_tf import scenes
from amdim_tf.config import DataConfig
from amdim_tf.errors import UserError

SPLITS = ("train", "test")


@dataclasses.dataclass(frozen=True)
class Source:
    """A split held in memory, with random access.

    Attributes:
        images: uint8 [N, H, W, 3].
        labels: int32 [N]; −1 for an unlabelled image.
        class_names: empty where the data set has no classes.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        """How many examples."""
        return len(self.labels)


def _load_scenes(config: DataConfig, split: str) -> Source:
    rendered = scenes.render(split, np.arange(scenes.SPLIT_SIZES[split]), config.image_size)
    return Source(rendered.images, rendered.labels, scenes.CLASS_NAMES)


_LOADERS = {"scenes": _load_scenes}


def load(config: DataConfig, split: str) -> Source:
    """The examples of one split of the configured data set."""
    if config.dataset not in _LOADERS:
        raise UserError(
            f"--dataset: expected one of {', '.join(_LOADERS)}. Received: {config.dataset!r}."
        )
    return _LOADERS[config.dataset](config, split)
