"""Test images with ground-truth segments: the built-in scenes, or a folder and its masks."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from amdim_tf import decode, folders, image_headers, records, safe_files, scenes, views
from amdim_tf.config import Config
from amdim_tf.errors import UserError

_BATCH = 250
# More would take hours to match with regions.
_MOST_SEGMENTS = 256
_FOLDERS = ("folder", "places205")


def count(config: Config, mask_dir: str) -> int:
    """How many test images have segments; raises a UserError where the data set has none."""
    if config.data.dataset == "scenes":
        if mask_dir:
            raise UserError(
                "--mask_dir: expected with a folder of images only; scenes have masks of their "
                f"own. Received: {mask_dir}."
            )
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
    if records.index_path(root, "test").exists():
        raise UserError(
            "--data_dir: expected a folder of image files for --probes=segmentation. Received: "
            f"{root}, whose images are packed. Use the folder that they were packed from."
        )
    paths, *_ = folders.list_split(root, "test")
    split = next(root / name for name in ("test", "val") if (root / name).is_dir())
    pairs: dict[pathlib.Path, pathlib.Path] = {}
    for path in map(pathlib.Path, map(os.fsdecode, paths)):
        mask = (pathlib.Path(mask_dir) / path.relative_to(split)).with_suffix(".png")
        if not mask.exists():
            raise UserError(f"--mask_dir: expected {mask}, the segments of {path}. There is none.")
        if mask in pairs:
            raise UserError(
                f"{mask}: expected the segments of one image. Received: two that it could belong "
                f"to, {pairs[mask]} and {path}. Rename one of them, and give it a mask."
            )
        pairs[mask] = path
    return [(path, mask) for mask, path in pairs.items()]


def _read(image: pathlib.Path, mask: pathlib.Path, config: Config):
    """(float32 [S, S, 3], int32 [S, S]) of one image and its mask."""
    try:
        pixels = decode.decode(safe_files.read_limited(image, folders.MOST_BYTES))
    except (OSError, tf.errors.OpError):
        raise UserError(f"{image}: expected an image. Received: other contents.") from None
    size = config.data.image_size
    view = views.evaluation_crop(config.views, tf.cast(pixels, tf.float32)[None], size)[0]
    cropped = _crop(_colours(mask, image, pixels.shape[:2])[None], config)[0]
    found, segments = np.unique(cropped, return_inverse=True)
    if len(found) > _MOST_SEGMENTS:
        raise UserError(
            f"{mask}: expected at most {_MOST_SEGMENTS} colours, one for each segment. Received: "
            f"{len(found)} in the evaluation view. Is it a photograph, or smoothed?"
        )
    return view.numpy(), segments.reshape(cropped.shape).astype(np.int32)


def _colours(mask: pathlib.Path, image: pathlib.Path, size) -> np.ndarray:
    """A number for each colour of a mask, int64 [H, W]; 16 bits and transparency count."""
    try:
        contents = safe_files.read_limited(mask, folders.MOST_BYTES)
        if not contents.startswith(image_headers.PNG):  # decode_png takes JPEG and GIF too
            raise UserError(f"{mask}: expected a PNG image. Received: other contents.")
        height, width = map(int, image_headers.image_size(contents))
        if (height, width) == tuple(size):
            colours = tf.io.decode_png(contents, dtype=tf.uint16).numpy().astype(np.int64)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{mask}: expected a PNG image. Received: {reason}.") from None
    except tf.errors.OpError:
        raise UserError(
            f"{mask}: expected a whole PNG image of at most {image_headers.PIXEL_LIMIT} pixels. "
            "Received: a damaged or larger one."
        ) from None
    if (height, width) != tuple(size):
        raise UserError(
            f"{mask}: expected {size[1]} x {size[0]} pixels, as {image} has. "
            f"Received: {width} x {height}."
        )
    return colours @ 65536 ** np.arange(colours.shape[2], dtype=np.int64)  # [H, W]


def _crop(masks: np.ndarray, config: Config) -> np.ndarray:
    """What the evaluation view shows of masks [n, H, W], by nearest neighbour: [n, S, S]."""
    size = config.data.image_size
    height, width = masks.shape[1:]
    top, left, tall, wide = views.evaluation_box(config.views, height, width, size).numpy()
    middles = (np.arange(size) + 0.5) / size
    rows = np.clip(np.floor(top + tall * middles), 0, height - 1).astype(int)
    columns = np.clip(np.floor(left + wide * middles), 0, width - 1).astype(int)
    return masks[:, rows[:, None], columns]
