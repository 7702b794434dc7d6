"""An exported SavedModel as a function from image files to features."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from amdim_tf import decode, image_headers, safe_files
from amdim_tf.errors import UserError

# The most pixels that are decoded for one call: 200 MB.
_PIXELS_AT_ONCE = 2**26
_METADATA_FILE = "amdim_tf.json"  # of an export
_LARGEST_METADATA = 2**26  # bytes; it names every class
_WANTED = "a directory that python -m amdim_tf.export has written"


class FeatureModel:
    """Features by the signatures of an export, which have all preprocessing inside.

    A picture has the same features in every signature, so the cheapest is called: files of one
    size are decoded here, which takes a fraction of what the signature for files of different
    sizes needs.

    Args:
        directory: of the SavedModel.
        outputs: names of features, such as f1 or phi7.
    """

    def __init__(self, directory, outputs: Sequence[str]):
        self._directory = directory
        self._loaded = _load(directory)  # kept: signatures do not hold their variables
        signatures = self._loaded.signatures
        shapes = {
            name: tuple(spec.shape[1:])
            for name, spec in signatures["maps"].structured_outputs.items()
        }
        unknown = [name for name in outputs if name not in shapes]
        if unknown or not outputs or len(set(outputs)) < len(outputs):
            raise UserError(
                f"--outputs: expected some of {', '.join(sorted(shapes))}, each once. "
                f"Received: {', '.join(outputs) or 'nothing'}."
            )
        self.shapes = {name: shapes[name] for name in outputs}
        only_f1 = list(outputs) == ["f1"]
        self._from_images = signatures["serving_default" if only_f1 else "maps"]
        self._from_files = signatures["encoded"] if only_f1 else None

    def of_images(self, images) -> dict[str, np.ndarray]:
        """Features, float32 [n, …], of images of one size, uint8 [n, H, W, 3]."""
        outputs = self._from_images(images=tf.convert_to_tensor(images, tf.uint8))
        return self._checked_rows(outputs, len(images))

    def _checked_rows(self, outputs, count: int) -> dict[str, np.ndarray]:
        """The wanted outputs, refused unless they have a row per image.

        Others would be put down to the wrong images.
        """
        features = {name: outputs[name].numpy() for name in self.shapes}
        for name, values in features.items():
            if values.shape[:1] != (count,):
                raise UserError(
                    f"--saved_model: expected {_WANTED}, with a row of {name} per image. Received: "
                    f"{self._directory}, which gives shape {list(values.shape)} for {count} images."
                )
        return features

    def _of_encoded(self, files: np.ndarray) -> dict[str, np.ndarray]:
        """Features by the signature for files of different sizes."""
        return self._checked_rows(self._from_files(encoded_images=_strings(files)), len(files))

    def of_files(self, files: Sequence[bytes]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Features [g, …] of the g files that can be decoded, and which these are, bool [n]."""
        files = np.fromiter(files, object, len(files))
        try:
            return self._of_good_files(files), np.ones(len(files), bool)
        except tf.errors.InvalidArgumentError:
            good = _decodable(_strings(files)).numpy()
            return self._one_by_one(files[good]), good

    def _of_good_files(self, files: np.ndarray) -> dict[str, np.ndarray]:
        """Features of files [n], all of which can be decoded; raises otherwise."""
        sizes = _image_sizes(_strings(files)).numpy()  # [n, 2]
        groups, group_of = np.unique(sizes, axis=0, return_inverse=True)
        group_of = group_of.reshape(-1)
        pixels = len(files) * int(sizes.astype(np.int64).prod(axis=1).max(initial=0))
        if len(groups) == 1 and pixels <= _PIXELS_AT_ONCE:
            return self.of_images(_decode_alike(_strings(files)))
        if self._from_files:
            return self._of_encoded(files)
        features = self._empty(len(files))
        for group, (height, width) in enumerate(groups):
            rows = np.flatnonzero(group_of == group)
            count = max(1, _PIXELS_AT_ONCE // (int(height) * int(width)))
            for start in range(0, len(rows), count):
                part = rows[start : start + count]
                images = _decode_alike(_strings(files[part]))
                for name, values in self.of_images(images).items():
                    features[name][part] = values
        return features

    def _one_by_one(self, files: np.ndarray) -> dict[str, np.ndarray]:
        """Features of decodable files, whatever their headers say of their sizes."""
        if self._from_files:
            return self._of_encoded(files)
        features = self._empty(len(files))
        for row, contents in enumerate(files):
            for name, values in self.of_images(decode.decode(contents)[tf.newaxis]).items():
                features[name][row] = values[0]
        return features

    def _empty(self, count: int) -> dict[str, np.ndarray]:
        return {name: np.empty((count, *shape), np.float32) for name, shape in self.shapes.items()}


def _strings(files: np.ndarray) -> tf.Tensor:
    return tf.constant(files.tolist(), tf.string, [len(files)])


_FILES = tf.TensorSpec([None], tf.string)


@tf.function(input_signature=[_FILES])
def _image_sizes(files):
    return image_headers.image_sizes(files)


@tf.function(input_signature=[_FILES])
def _decode_alike(files):
    return decode.decode_alike(files)


@tf.function(input_signature=[_FILES])
def _decodable(files):
    """For each file whether it can be decoded, bool [n]."""

    def is_good(contents):
        return decode.or_else(lambda file: tf.size(decode.decode(file)), contents, 0)[1]

    return tf.map_fn(is_good, files, fn_output_signature=tf.bool)


def _checked(directory) -> pathlib.Path:
    """A directory, if it may be a SavedModel's."""
    path = pathlib.Path(directory)
    if not (path / "saved_model.pb").is_file():
        raise UserError(
            f"--saved_model: expected {_WANTED}. Received: {path}, which has no saved_model.pb."
        )
    return path


def _load(directory):
    """The SavedModel in a directory, if it has the signatures of an export."""
    path = _checked(directory)
    try:
        loaded = tf.saved_model.load(str(path))
    except Exception as error:  # damaged files make TensorFlow fail in more ways than can be listed
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"--saved_model: expected {_WANTED}. Received: {path}, which cannot be loaded "
            f"({reason})."
        ) from None
    missing = {"serving_default", "encoded", "maps"} - set(getattr(loaded, "signatures", ()))
    if missing:
        raise UserError(
            f"--saved_model: expected {_WANTED}. Received: {path}, which has no signature "
            f"{', '.join(sorted(missing))}."
        )
    return loaded


def identity(directory) -> dict:
    """What tells a SavedModel from another: a digest of its graph and weights, and its step.

    Returns:
        {"path", "sha256", "step"}; the step is None where no amdim_tf.json tells it.
    """
    root = _checked(directory).resolve()
    digest = hashlib.sha256()
    for path in [root / "saved_model.pb", *sorted((root / "variables").glob("*"))]:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return {
        "path": str(root),
        "sha256": digest.hexdigest(),
        "step": metadata(root).get("step"),
    }


def check_same(directory, sha256: str) -> None:
    """Refuses an export that has taken another's place since its digest was noted."""
    if identity(directory)["sha256"] != sha256:
        raise UserError(
            "--saved_model: expected the same export during the whole extraction. Received: "
            f"another one at {directory}. Extract from a copy that nobody replaces."
        )


def metadata(directory) -> dict:
    """What amdim_tf.json says about an export; nothing where it is not there."""
    try:
        path = pathlib.Path(directory) / _METADATA_FILE
        document = json.loads(safe_files.read_limited(path, _LARGEST_METADATA))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
