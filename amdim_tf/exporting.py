"""export(model_dir): a SavedModel, and a LiteRT file, checked before anybody can see them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import amdim_tf
from amdim_tf import checkpoint_files, checkpoints, config_file, safe_files, serving, views
from amdim_tf.directory_locks import locked
from amdim_tf.errors import Interrupted, UserError
from amdim_tf.model import AMDIM
from amdim_tf.signals import StopSignals

METADATA_FILE, LITE_FILE = "amdim_tf.json", "f1.tflite"
FORMAT = "amdim_tf export"
_OWN_NAMES = {METADATA_FILE, LITE_FILE, "saved_model.pb", "fingerprint.pb", "variables", "assets"}
_OWN_VARIABLES = re.compile(r"variables/variables\.(index|data-\d{5}-of-\d{5})")
_DTYPES = ("float32", "bfloat16")
_LARGEST_METADATA = 2**26  # bytes; it names every class
# Largest difference from the float32 model, as a share of the largest output or of 1. bfloat16 has
# 8 bits and errors of a few percent; its limit is there to find what is broken.
_TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1, "LiteRT": 1e-4, "posterior": 1e-3}
_IMAGES_CHECKED = 3  # of each size


def export(
    model_dir, output_dir=None, dtype: str = "float32", tflite: bool = False
) -> pathlib.Path:
    """Writes the newest checkpoint of a run as a SavedModel.

    It is written aside, loaded, compared with the model, and only then takes its place; so does one
    that replaces an earlier export.

    Args:
        model_dir: directory of a training run.
        output_dir: a new or empty directory, or an earlier export; by default MODEL_DIR/export.
        dtype: of weights and arithmetic, float32 or bfloat16; outputs are float32.
        tflite: add f1.tflite, the f1 path as a LiteRT file.

    Returns:
        The directory that holds the export.
    """
    if dtype not in _DTYPES:
        raise UserError(f"--dtype: expected {' or '.join(_DTYPES)}. Received: {dtype}.")
    if tflite and dtype != "float32":
        raise UserError(
            f"--tflite: expected --dtype=float32, as LiteRT has no bfloat16. Received: {dtype}."
        )
    model_dir = pathlib.Path(model_dir)
    target = _checked_target(model_dir, output_dir or model_dir / "export")
    _clear_leftovers(target)
    replaced_step = _step_of_export(target)
    config, facts = config_file.load(config_file.path_in(model_dir))
    model, step, digest = _load(model_dir)
    served = model if dtype == "float32" else serving.in_bfloat16(model, config)
    with StopSignals() as signals, _directory_beside(target) as aside:
        with _refusing(target):
            serving.save(served, aside)
        _stop_if_asked(signals)
        loaded = tf.saved_model.load(str(aside))
        differences = {"SavedModel": check_signatures(loaded.signatures, model, dtype)}
        if tflite:
            differences[LITE_FILE] = _write_lite_model(aside / LITE_FILE, model, target)
        metadata = {
            **_origin(step, digest, dtype),
            "largest_difference": differences,
            "signatures": _described(loaded.signatures),
            "classes": facts["classes"],
            "config": dataclasses.asdict(config),
        }
        _stop_if_asked(signals)
        with _refusing(target):
            (aside / METADATA_FILE).write_text(json.dumps(metadata, indent=2) + "\n")
            safe_files.put_directory(aside, target)
    for name, difference in differences.items():
        print(f"Checked {name}: largest difference from the model {difference:.1e}.")
    instead = "" if replaced_step is None else f" It replaces that of step {replaced_step}."
    print(f"Wrote {target}: step {step}, {', '.join(metadata['signatures'])}.{instead}")
    return target


def _load(model_dir: pathlib.Path) -> tuple[AMDIM, int, str]:
    """The model of the newest checkpoint, its step, and its manifest's digest."""
    directory = config_file.checkpoints_in(model_dir)
    while True:
        model, step = checkpoints.load_model(model_dir, step_wanted=True)
        with contextlib.suppress(FileNotFoundError):  # a training has made room for a newer one
            return model, step, checkpoint_files.read_manifest(directory, step)["sha256"]


def _checked_target(model_dir: pathlib.Path, output_dir) -> pathlib.Path:
    """The real path of the output directory, if an export may be put there."""

    def refuse(wanted: str, received: str):
        raise UserError(f"--output_dir: expected {wanted}. Received: {received}.")

    if "://" in str(output_dir) or set(str(output_dir)) & set("*?[]\\"):
        refuse("a local directory without * ? [ ] and backslash in its name", str(output_dir))
    target = pathlib.Path(os.path.realpath(output_dir))
    if target.is_relative_to(os.path.realpath(config_file.checkpoints_in(model_dir))):
        refuse("a directory outside the run's checkpoints", str(target))
    for parent in target.parents:
        if (parent / "saved_model.pb").exists():
            refuse("a directory outside other exports", f"{target}, which is inside {parent}")
    if target.exists() and not target.is_dir():
        refuse("a directory", f"{target}, which is a file")
    names = [path.name for path in target.iterdir()] if target.exists() else []
    foreign = _foreign_in(target) if _step_of_export(target) is not None else names
    if foreign:
        refuse(
            "a new or empty directory, or an earlier export",
            f"{target}, which holds {', '.join(sorted(foreign)[:3])}",
        )
    return target


def _foreign_in(export_dir: pathlib.Path) -> list[str]:
    """What is in the directory of an export, or deeper, and is no part of it."""
    names = [path.relative_to(export_dir).as_posix() for path in export_dir.rglob("*")]
    return [name for name in names if name not in _OWN_NAMES and not _OWN_VARIABLES.fullmatch(name)]


def _step_of_export(target: pathlib.Path) -> int | None:
    """The step of the export in a directory; None where there is none."""
    try:
        contents = safe_files.read_limited(target / METADATA_FILE, _LARGEST_METADATA)
        metadata = json.loads(contents)
        return metadata["step"] if metadata["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@contextlib.contextmanager
def _refusing(target: pathlib.Path) -> Iterator[None]:
    """Turns a failure to write into one line that names the flag."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        # TensorFlow puts the file before the reason, and the operation after it.
        first_line = str(error).splitlines()[0]
        reason = getattr(error, "strerror", None) or first_line.split("; ")[-1].split(" [Op:")[0]
        raise UserError(
            f"--output_dir: expected room and permission for an export. Received: {target} "
            f"({reason})."
        ) from None


def _clear_leftovers(target: pathlib.Path) -> None:
    """Removes what an export to the same place left when it was killed.

    One that was killed while it replaced an earlier export had moved that aside: it comes back. An
    export that is still running holds a lock on its directory, which stays.
    """
    nearest = next(parent for parent in target.parents if parent.exists())
    name = re.compile(re.escape(target.name) + r"\.partial-\w{8}")
    with _refusing(target):
        leftovers = [path for path in nearest.iterdir() if name.fullmatch(path.name)]
        for scratch in leftovers:
            if not {"new", "replaced"}.issuperset(path.name for path in scratch.iterdir()):
                continue
            with contextlib.suppress(BlockingIOError), locked(scratch):
                if (scratch / "replaced").exists() and not target.exists():
                    (scratch / "replaced").rename(target)
                shutil.rmtree(scratch)


@contextlib.contextmanager
def _directory_beside(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory on the same disk, to be written and moved; what is left of it is removed."""
    nearest = next(parent for parent in target.parents if parent.exists())
    with _refusing(target):
        scratch = pathlib.Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=nearest))
    try:
        aside = scratch / "new"
        aside.mkdir()  # with the usual permissions, while `scratch` is for its owner alone
        with locked(scratch):
            yield aside
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _stop_if_asked(signals: StopSignals) -> None:
    """Leaves the export between two of its steps."""
    if signals.received:
        raise Interrupted(f"Stopped by {signals.received}. Nothing was written.")


def check_signatures(signatures, model: AMDIM, dtype: str) -> float:
    """Compares the signatures of a loaded export with the model, on images of two sizes.

    Returns:
        The largest difference.
    """
    size = model.image_size
    differences = []
    for height, width in ((size, size), (size + 1, 2 * size - 17)):
        images = _noise(height, width)
        expected = model.encode(model.preprocess(images))
        files = tf.stack([tf.io.encode_png(image) for image in images])
        for outputs in (
            signatures["serving_default"](images=tf.constant(images)),
            signatures["encoded"](encoded_images=files),
            signatures["maps"](images=tf.constant(images)),
        ):
            differences += [
                _difference(output, expected[name], dtype) for name, output in outputs.items()
            ]
        if model.mixture is not None:
            differences.append(_mixture_difference(signatures, model, images, dtype))
    return max(differences)


def _mixture_difference(signatures, model: AMDIM, images: np.ndarray, dtype: str) -> float:
    """The largest difference of the mixture's components, each image paired with another.

    Posteriors, whose temperature magnifies differences, are compared in float32 alone.
    """
    others = images[::-1].copy()
    outputs = signatures["mixture"](images=images, other_images=others)
    f1, phi7 = (
        model.encode(model.preprocess(given))[name]
        for given, name in ((images, "f1"), (others, "phi7"))
    )
    if dtype == "float32":
        _difference(outputs["posterior"], model.posterior(f1, phi7), "posterior")
    return _difference(outputs["components"], model.mixture(f1), dtype)


def _write_lite_model(path: pathlib.Path, model: AMDIM, target: pathlib.Path) -> float:
    """Writes a LiteRT file that has passed its check; returns the largest difference."""
    contents = serving.lite_model(model)
    difference = check_lite_model(contents, model)
    with _refusing(target):
        path.write_bytes(contents)
    return difference


def check_lite_model(contents: bytes, model: AMDIM) -> float:
    """Runs a LiteRT file and compares it with the model, on one image and on several.

    Returns:
        The largest difference.
    """
    with warnings.catch_warnings():
        # The interpreter announces that it will move to another package.
        warnings.simplefilter("ignore", UserWarning)
        run = tf.lite.Interpreter(model_content=contents).get_signature_runner()
    images = _noise(model.image_size, model.image_size)
    normalized = views.normalize(model.view_settings, tf.cast(images, tf.float32))
    expected = model.encode(normalized)["f1"]
    return max(
        _difference(run(images=images[:count])["f1"], expected[:count], "LiteRT")
        for count in (1, len(images))
    )


def _noise(height: int, width: int) -> np.ndarray:
    """Images to compare on, uint8 [n, H, W, 3]."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, [_IMAGES_CHECKED, height, width, 3]).astype(np.uint8)


def _difference(output, expected, kind: str) -> float:
    """The largest difference between two tensors, refused where it is above the tolerance."""
    output, expected = np.asarray(output), np.asarray(expected)
    difference = float(np.max(np.abs(output - expected)))
    limit = _TOLERANCE[kind] * max(1.0, float(np.max(np.abs(expected))))
    if not difference <= limit:  # so written, a NaN is refused too
        raise UserError(
            f"{kind} export: expected features within {limit:.1e} of the model's. Received: a "
            f"difference of {difference:.1e}, where nan means that training diverged. "
            "Nothing was written."
        )
    return difference


def _origin(step: int, checkpoint_digest: str, dtype: str) -> dict[str, Any]:
    """Where an export comes from, for amdim_tf.json."""
    return {
        "format": FORMAT,
        "format_version": 1,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "step": step,
        "checkpoint_sha256": checkpoint_digest,
        "dtype": dtype,
        "versions": {
            "amdim_tf": amdim_tf.__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "python": platform.python_version(),
        },
    }


def _described(signatures) -> dict[str, Any]:
    """Names, types and shapes of each signature's tensors; an unknown side is null."""

    def tensors(specs):
        return {
            name: {"dtype": spec.dtype.name, "shape": spec.shape.as_list()}
            for name, spec in sorted(specs.items())
        }

    return {
        name: {
            "inputs": tensors(function.structured_input_signature[1]),
            "outputs": tensors(function.structured_outputs),
        }
        for name, function in signatures.items()
    }
