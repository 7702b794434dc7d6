"""Features of every image of a split: extracted once, kept in MODEL_DIR/evaluation/features."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from amdim_tf import directory_locks, input_pipeline, safe_files, winograd
from amdim_tf.config import Config
from amdim_tf.errors import UserError
from amdim_tf.examples import ArraySource, Source
from amdim_tf.feature_splits import Features, blocks
from amdim_tf.model import AMDIM
from amdim_tf.progress import Progress

_BATCH = 250
_FILES = ("values.npy", "labels.npy")
_MOST_STAMP_BYTES = 10_000  # of key.json, which is far smaller
# Side of the images whose pixels are a baseline: a classifier's matrices grow with its 4th power.
PIXELS_SIDE = 32


def f1_of(model: AMDIM) -> Callable:
    """A function from normalized images [n, S, S, 3] to f1 [n, D], in inference mode.

    On a CPU it computes two halves of a batch side by side, as a training step does two views.
    """
    on_cpu = not tf.config.list_physical_devices("GPU")

    def encode(images):
        with winograd.allowed(on_cpu):
            return model.encoder(images, training=False)["f1"]

    @tf.function(reduce_retracing=True)
    def f1(images):
        if not on_cpu:
            return encode(images)
        count = images.shape[0]
        if count is None:
            count = tf.shape(images)[0]
        half = (count + 1) // 2
        # Neither is empty: of an odd number both have the image in the middle.
        first, second = encode(images[:half]), encode(images[count - half :])  # [half, D]
        return tf.concat([first, second[2 * half - count :]], axis=0)

    return f1


def bag_of_features(model: AMDIM, f1: np.ndarray) -> np.ndarray:
    """Mean and maximum over the components of a mixture: f1 [N, D] -> float32 [N, 2D]."""
    bags = np.empty([len(f1), 2 * f1.shape[1]], np.float32)
    for rows, block in blocks(f1):
        components = model.mixture(tf.constant(block))  # [n, K, D]
        pooled = (tf.reduce_mean(components, axis=1), tf.reduce_max(components, axis=1))
        bags[rows] = tf.concat(pooled, axis=1)
    return bags


def pixels_of(images):
    """The evaluation view's raw pixels, the plainest baseline: [n, S, S, 3] -> [n, 3072].

    Larger views are brought to 32×32 by the mean of each square of pixels.
    """
    factor = images.shape[1] // PIXELS_SIDE
    small = tf.nn.avg_pool2d(images, factor, factor, "VALID")  # [n, 32, 32, 3]
    return tf.reshape(small, [len(images), -1])


def cached_features(
    directory: pathlib.Path, key: str, function: Callable, source: Source, config: Config, label
) -> Features:
    """Features of every image of a source, in order, from `directory` where they are there already.

    A directory holds one set: features with another key take its place, so that a run that is
    evaluated at every checkpoint does not fill the disk. Of several evaluations at once, one
    extracts and the others wait for it.

    Args:
        directory: of these features.
        key: what they depend on; see `features_key`.
        function: normalized images -> features [n, D].
        source: the images.
        config: the evaluation view's settings.
        label: for the progress bar.

    Returns:
        Features whose values are a memory map.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with safe_files.named(directory.parent), directory_locks.locked(directory.parent, wait=True):
        features = _read(directory, key)
        if features is None:
            aside = directory.with_name(directory.name + ".partial")
            for left in directory.parent.glob("*.partial"):  # of evaluations that were killed
                shutil.rmtree(left, ignore_errors=True)
            try:
                _extract_into(aside, function, source, config, label)
                (aside / "key.json").write_text(json.dumps(_stamp(aside, key)))
                shutil.rmtree(directory, ignore_errors=True)
                safe_files.rename(aside, directory)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            features = _read(directory, key)
    return features


def _stamp(directory: pathlib.Path, key: str) -> dict:
    """What key.json holds: the key, and sizes and digests of the files that it vouches for."""
    sizes = {name: (directory / name).stat().st_size for name in _FILES}
    digests = {name: _digest_of(directory / name) for name in _FILES}
    return {"key": key, "bytes": sizes, "sha256": digests}


def _digest_of(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _read(directory: pathlib.Path, key: str) -> Features | None:
    """The features in a directory, if they are whole and have this key."""
    try:
        stamp = json.loads(safe_files.read_limited(directory / "key.json", _MOST_STAMP_BYTES))
        if stamp != _stamp(directory, key):
            return None
        # As maps, which a damaged header cannot make larger than their files.
        arrays = {
            name: np.load(directory / name, mmap_mode="r", allow_pickle=False) for name in _FILES
        }
    except Exception:  # damaged headers raise errors of many kinds; the features are made again
        return None
    values, labels = arrays.values()
    whole = all(
        array.offset + array.nbytes == stamp["bytes"][name] for name, array in arrays.items()
    )
    expected = (values.ndim, values.dtype, labels.dtype) == (2, np.float32, np.int32)
    if not whole or not expected or labels.shape != values.shape[:1]:
        return None
    return Features(values, np.array(labels))


def _extract_into(directory: pathlib.Path, function, source, config, label) -> None:
    """Writes values.npy [N, D] and labels.npy [N]; images that cannot be decoded are left out."""
    directory.mkdir()
    path, values, done = directory / "values.npy", None, 0
    labels = np.empty(len(source), np.int32)
    with Progress(len(source), label, "image") as progress:
        for images, numbers in input_pipeline.evaluation_batches(source, config, _BATCH):
            part = function(images).numpy()  # [n, D]
            if values is None:
                shape = (len(source), part.shape[1])
                values = _new_map(path, shape)
            rows = slice(done, done + len(part))
            values[rows], labels[rows] = part, numbers.numpy()
            done += len(part)
            progress.advance(len(part))
    source.skipped.check()
    if values is None:
        raise UserError(f"{label}: expected images. Received: none that can be decoded.")
    if done < len(source):
        np.save(directory / "fewer.npy", values[:done])
        (directory / "fewer.npy").replace(path)
    np.save(directory / "labels.npy", labels[:done])


def _new_map(path: pathlib.Path, shape: tuple[int, int]) -> np.ndarray:
    """A float32 .npy file, mapped for writing.

    Its blocks are taken at once: a map of a file with holes ends the process, without a word, when
    the disk is full.
    """
    values = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return values


def features_key(weights: str, source: Source, config: Config) -> str:
    """A digest of what features depend on: the weights, the images and the evaluation view.

    Args:
        weights: digest of the encoder's, see `weights_digest`.
        source: the images; those on disk are known by their files' places, sizes and times.
        config: the evaluation view's settings.
    """
    digest = hashlib.sha256(weights.encode())
    recipe = config.views
    view = (config.data.image_size, recipe.evaluation_resize, recipe.mean, recipe.std)
    digest.update(repr(view).encode())
    if isinstance(source, ArraySource):
        digest.update(np.ascontiguousarray(source.images))
        digest.update(np.ascontiguousarray(source.labels))
    else:
        for index in range(len(source)):
            digest.update(source.version_of(index))
    return digest.hexdigest()


def weights_digest(model: AMDIM) -> str:
    """A digest of the encoder's weights and running statistics."""
    digest = hashlib.sha256()
    for variable in model.encoder.variables:
        digest.update(variable.path.encode() + np.ascontiguousarray(variable.numpy()).tobytes())
    return digest.hexdigest()
