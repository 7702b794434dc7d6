"""Data sets by name."""

from __future__ import annotations

import numpy as np

from amdim_tf import folders, scenes, tfds_sets
from amdim_tf.config import DataConfig
from amdim_tf.examples import ArraySource, SkippedImages, Source

# train: what the encoder learns from. labelled: what classifiers learn from. test: what is counted.
SPLITS = ("train", "labelled", "test")


def load(config: DataConfig, split: str) -> Source:
    """The examples of one split of the configured data set.

    "train" and "labelled" are the same, except for stl10, whose unlabelled images are in "train".
    """
    if config.dataset == "scenes":
        return _load_scenes(config, "train" if split == "labelled" else split)
    if config.dataset in tfds_sets.NAMES:
        return tfds_sets.load(config, split)
    return folders.load_folder(config, "train" if split == "labelled" else split)


def _load_scenes(config: DataConfig, split: str) -> ArraySource:
    count = scenes.SPLIT_SIZES[split]
    rendered = scenes.render(split, np.arange(count), config.image_size)
    skipped = SkippedImages(count, config.max_bad_images)
    return ArraySource(rendered.images, rendered.labels, scenes.CLASS_NAMES, skipped)
