"""Data sets by name."""

from __future__ import annotations

import pathlib

import numpy as np

from amdim_tf import folders, scenes, tfds_sets
from amdim_tf.config import DataConfig
from amdim_tf.examples import ArraySource, SkippedImages, Source

# train: what the encoder learns from. labelled: what classifiers learn from. test: what is counted.
SPLITS = ("train", "labelled", "test")


def load(config: DataConfig, split: str, files_as_files: bool = False) -> Source:
    """The examples of one split of the configured data set.

    "train" and "labelled" are the same, except for stl10, whose unlabelled images are in "train".

    Args:
        config: which data set.
        split: among SPLITS.
        files_as_files: leave image files encoded, each with its name, even where they are small
            enough to be decoded into memory.
    """
    if config.dataset == "scenes":
        return _load_scenes(config, "train" if split == "labelled" else split)
    if config.dataset in tfds_sets.NAMES:
        return tfds_sets.load(config, split, files_as_files)
    split = "train" if split == "labelled" else split
    return folders.load_folder(config, split, files_as_files)


def splits_of(config: DataConfig) -> tuple[str, ...]:
    """Those of SPLITS that the configured data set has; a folder may be without test images."""
    if config.dataset == "scenes" or config.dataset in tfds_sets.NAMES:
        return SPLITS
    return ("labelled", *folders.splits_of(pathlib.Path(config.data_dir)))


def _load_scenes(config: DataConfig, split: str) -> ArraySource:
    count = scenes.SPLIT_SIZES[split]
    rendered = scenes.render(split, np.arange(count), config.image_size)
    skipped = SkippedImages(count, config.max_bad_images)
    return ArraySource(rendered.images, rendered.labels, scenes.CLASS_NAMES, skipped)
