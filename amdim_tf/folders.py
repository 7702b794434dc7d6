"""Folders of images: train/CLASS/*, test or val/CLASS/*, or any tree without labels."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import tensorflow as tf

from amdim_tf import decode, records, safe_files
from amdim_tf.config import DataConfig
from amdim_tf.errors import UserError, warn
from amdim_tf.examples import UNLABELLED, EncodedSource, SkippedImages, Source, in_memory

MOST_BYTES = 2**30  # of an image file


def image_files(directory: pathlib.Path) -> tuple[list[bytes], list[str]]:
    """Every image file below a directory, in sorted order, and what could not be read.

    Links are followed, each real directory once, so that a loop of links ends.
    """
    found: list[bytes] = []
    unreadable: list[str] = []
    visited: set[str] = set()

    def note(error: OSError) -> None:
        unreadable.append(os.fsdecode(error.filename))

    for folder, folders, files in os.walk(os.fsencode(directory), onerror=note, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders.sort()
        found += [
            os.path.join(folder, name)
            for name in sorted(files)
            if os.path.splitext(os.fsdecode(name))[1].lower() in decode.EXTENSIONS
        ]
    return found, unreadable


def _folder_of_split(root: pathlib.Path, split: str) -> pathlib.Path | None:
    """ROOT/train, or ROOT/val or ROOT/test; None for a tree without splits."""
    if not (root / "train").is_dir():
        return None
    names = ("train",) if split == "train" else ("test", "val")
    for name in names:
        if (root / name).is_dir():
            return root / name
    raise UserError(
        f"--data_dir: expected {root / 'test'} or {root / 'val'} with the test images, beside "
        f"{root / 'train'}. Received: neither."
    )


def splits_of(root: pathlib.Path) -> tuple[str, ...]:
    """The splits that a folder, packed or not, has: train and, where there is one, test."""
    tests = (root / "train").is_dir() and any((root / name).is_dir() for name in ("test", "val"))
    packed = records.index_path(root, "test").exists()
    return ("train", "test") if tests or packed else ("train",)


def list_split(root: pathlib.Path, split: str):
    """Paths and labels of a split.

    Returns:
        (paths, labels int32 [N], class names, directories that could not be read).
    """
    if not root.is_dir():
        raise UserError(f"--data_dir: expected a directory of images. Received: {root}.")
    folder = _folder_of_split(root, split)
    if folder is None and split != "train":
        raise UserError(
            f"--data_dir: expected {root / 'train'}/CLASS/… and {root / 'test'}/CLASS/… for a "
            "test. Received: a tree of images without splits or labels."
        )
    paths, unreadable = image_files(folder or root)
    if not paths:
        raise UserError(
            f"--data_dir: expected images ({', '.join(decode.EXTENSIONS)}) below {folder or root}. "
            "Received: none."
        )
    if folder is not None:
        paths = _without_strays(paths, folder)
    return paths, *_labels_of(paths, folder), unreadable


def load_folder(config: DataConfig, split: str, files_as_files: bool = False) -> Source:
    """A split of a folder of images, or of one that tools/prepare_folder.py has packed.

    With `files_as_files` the images stay encoded.
    """
    if not config.data_dir:
        raise UserError(
            f"--data_dir: expected the directory of images for --dataset={config.dataset}. "
            "Received: nothing."
        )
    root = pathlib.Path(config.data_dir)
    if records.index_path(root, split).exists():
        return records.source(records.read_index(root, split), config, files_as_files)
    paths, labels, class_names, unreadable = list_split(root, split)
    skipped = SkippedImages(len(paths), config.max_bad_images)
    for name in unreadable:
        skipped.add(name)
    source = _file_source(paths, labels, class_names, skipped)
    return source if files_as_files else in_memory(source) or source


def _without_strays(paths: list[bytes], folder: pathlib.Path) -> list[bytes]:
    """Leaves out what lies directly in a split's folder, if other images lie in class folders.

    One such file has no class, and is no reason to take the labels from all others.
    """
    strays = [path for path in paths if os.path.dirname(path) == os.fsencode(folder)]
    if len(strays) in (0, len(paths)):
        return paths
    warn(
        f"{os.fsdecode(strays[0])}: expected in a class folder, as other images of {folder} are. "
        f"Left out: {len(strays)} of {len(paths)} images. To learn from all of them without "
        "labels, use a directory of another name than train."
    )
    return paths[len(strays) :]  # a walk begins with them


def _labels_of(paths: list[bytes], folder: pathlib.Path | None):
    """Labels from the first directory below the split's; none where files lie directly in it."""
    if folder is None or os.path.dirname(paths[0]) == os.fsencode(folder):
        return np.full(len(paths), UNLABELLED, np.int32), ()
    first = [os.path.relpath(path, os.fsencode(folder)).split(os.sep.encode())[0] for path in paths]
    names = sorted(set(first))
    numbers = {name: number for number, name in enumerate(names)}
    labels = np.array([numbers[name] for name in first], np.int32)
    return labels, tuple(os.fsdecode(name) for name in names)


def _file_source(paths, labels, class_names, skipped) -> EncodedSource:
    all_labels = tf.constant(labels)

    def stored(index):
        # TensorFlow's own function would wait at a pipe for ever, and die of a file without end.
        return safe_files.read_limited(os.fsdecode(paths[index]), MOST_BYTES)

    def parse(files, indices):
        return files, tf.gather(all_labels, indices)

    def name_of(index):
        return os.fsdecode(paths[index])

    return EncodedSource(len(paths), stored, parse, name_of, name_of, class_names, skipped)
