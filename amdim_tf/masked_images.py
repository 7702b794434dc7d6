"""Test images with ground-truth segments: the built-in scenes, or a folder and its masks."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from amdim_tf import decode, folders, safe_files, scenes, views
from amdim_tf.config import Config
from amdim_tf.errors import UserError

_BATCH = 250
_FOLDERS = ("folder", "places205")


def count(config: Config, mask_dir: str) -> int:
    """How many test images have segments; raises a UserError where the data set has none."""
    if config.data.dataset == "scenes":
        return scenes.SPLIT_SIZES["test"]
    return len(_pairs(config, mask_dir))


def batches(config: Config, mask_dir: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Evaluation views before normalization, and their segments, a batch at a time.

    Args:
        config: data and views.
        mask_dir: for folders: a directory with a PNG file for each test image, at the same place
            below it. Each distinct colour is a segment.

    Yields:
        (images float32 [n, S, S, 3] in 0..255, segments int32 [n, S, S] from 0).
    """
    if config.data.dataset == "scenes":
        size = config.data.image_size
        for start in range(0, scenes.SPLIT_SIZES["test"], _BATCH):
            stop = min(start + _BATCH, scenes.SPLIT_SIZES["test"])
            drawn = scenes.render("test", np.arange(start, stop), size)
            images = views.evaluation_crop(config.views, tf.cast(drawn.images, tf.float32), size)
            yield images.numpy(), _crop(drawn.masks.astype(np.int32), config)
        return
    pairs = _pairs(config, mask_dir)
    for start in range(0, len(pairs), _BATCH):
        both = [_read(image, mask, config) for image, mask in pairs[start : start + _BATCH]]
        yield tuple(np.stack(part) for part in zip(*both, strict=True))


def _pairs(config: Config, mask_dir: str) -> list[tuple[pathlib.Path, pathlib.Path]]:
    """Test images of a folder, each with the file of its mask."""
    if config.data.dataset not in _FOLDERS:
        raise UserError(
            f"--probes=segmentation: expected --dataset=scenes, or {' or '.join(_FOLDERS)} with "
            f"--mask_dir. Received: --dataset={config.data.dataset}, which has no masks."
        )
    if not mask_dir or not pathlib.Path(mask_dir).is_dir():
        raise UserError(
            "--mask_dir: expected a directory with a PNG file of segments for each test image. "
            f"Received: {mask_dir or 'nothing'}."
        )
    if not config.data.data_dir:
        raise UserError("--data_dir: expected the directory of images. Received: nothing.")
    root = pathlib.Path(config.data.data_dir)
    paths, *_ = folders.list_split(root, "test")
    split = next(root / name for name in ("test", "val") if (root / name).is_dir())
    pairs = []
    for path in map(pathlib.Path, map(os.fsdecode, paths)):
        mask = (pathlib.Path(mask_dir) / path.relative_to(split)).with_suffix(".png")
        if not mask.exists():
            raise UserError(f"--mask_dir: expected {mask}, the segments of {path}. There is none.")
        pairs.append((path, mask))
    return pairs


def _read(image: pathlib.Path, mask: pathlib.Path, config: Config):
    """(float32 [S, S, 3], int32 [S, S]) of one image and its mask."""
    pictures = []
    for path in (image, mask):
        try:
            pictures.append(decode.decode(safe_files.read_limited(path, folders.MOST_BYTES)))
        except (OSError, tf.errors.OpError):
            raise UserError(f"{path}: expected an image. Received: other contents.") from None
    pixels, colours = pictures
    if pixels.shape != colours.shape:
        raise UserError(
            f"{mask}: expected {pixels.shape[1]} x {pixels.shape[0]} pixels, as {image} has. "
            f"Received: {colours.shape[1]} x {colours.shape[0]}."
        )
    size = config.data.image_size
    view = views.evaluation_crop(config.views, tf.cast(pixels, tf.float32)[None], size)[0]
    numbers = colours.numpy().astype(np.int32) @ np.array([65536, 256, 1], np.int32)  # [H, W]
    cropped = _crop(numbers[None], config)[0]
    _, segments = np.unique(cropped, return_inverse=True)
    return view.numpy(), segments.reshape(cropped.shape).astype(np.int32)


def _crop(masks: np.ndarray, config: Config) -> np.ndarray:
    """What the evaluation view shows of masks [n, H, W], by nearest neighbour: [n, S, S]."""
    size = config.data.image_size
    height, width = masks.shape[1:]
    top, left, tall, wide = views.evaluation_box(config.views, height, width, size).numpy()
    middles = (np.arange(size) + 0.5) / size
    rows = np.clip(np.floor(top + tall * middles), 0, height - 1).astype(int)
    columns = np.clip(np.floor(left + wide * middles), 0, width - 1).astype(int)
    return masks[:, rows[:, None], columns]
