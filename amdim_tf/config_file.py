"""MODEL_DIR/config.json: the settings of a run, its classes, and a record of every start."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

from amdim_tf import checkpoint_files, safe_files
from amdim_tf.config import (
    MOST_CLASSES,
    SECTIONS,
    SETTINGS,
    Config,
    settings_of,
    update,
)
from amdim_tf.errors import UserError
from amdim_tf.setting_fields import shown

FORMAT_VERSION = 2
MOST_STARTS = 1000
_MOST_BYTES = 2**26


def path_in(model_dir: str | os.PathLike[str]) -> pathlib.Path:
    """Where a run's settings are kept."""
    return pathlib.Path(model_dir) / "config.json"


def checkpoints_in(model_dir: str | os.PathLike[str]) -> pathlib.Path:
    """Where a run's checkpoints are kept."""
    return pathlib.Path(model_dir) / "checkpoints"


def run_in(model_dir: str | os.PathLike[str]) -> tuple[Config, dict[str, Any]] | None:
    """The settings and facts of the run that has checkpoints in a directory, or None.

    A run that was stopped before its first checkpoint has nothing to go on with.
    """
    try:
        steps = checkpoint_files.steps_in(checkpoints_in(model_dir))
    except OSError as error:
        raise UserError(
            f"{checkpoints_in(model_dir)}: expected a directory of checkpoints. "
            f"Received: {error.strerror}."
        ) from None
    return load(path_in(model_dir)) if steps else None


def changes(before: Config, after: Config, model_dir) -> dict[str, list[Any]]:
    """What a run is to go on with: setting -> [before, after], of those that may change.

    Raises:
        UserError: where one differs that may not change in mid-run.
    """
    old, new = settings_of(before), settings_of(after)
    changed = {name: [old[name], new[name]] for name in SETTINGS if old[name] != new[name]}
    refused = [
        f"--{name}={shown(new[name])} (there: {shown(old[name])})"
        for name in changed
        if not SETTINGS[name][1].metadata.get("changeable")
    ]
    if refused:
        raise UserError(
            f"--model_dir: {model_dir} holds a run with other settings: {'; '.join(refused)}. "
            "Use another --model_dir, or leave these flags out to go on with that run."
        )
    return changed


def save(config: Config, path: str | os.PathLike[str], extra: dict[str, Any]) -> None:
    """Writes config.json: format version, `extra` facts about the run, then every setting."""
    document = {"format_version": FORMAT_VERSION, **extra, **dataclasses.asdict(config)}
    safe_files.write_whole(pathlib.Path(path), (json.dumps(document, indent=2) + "\n").encode())


def load(path: str | os.PathLike[str]) -> tuple[Config, dict[str, Any]]:
    """Reads config.json back; returns the configuration and the other facts in the file."""
    path = pathlib.Path(path)
    try:
        document = json.loads(safe_files.read_limited(path, _MOST_BYTES))
    except FileNotFoundError:
        raise UserError(
            f"{path}: expected the config.json of a training run; there is none. "
            "Check --model_dir, or train first."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected readable JSON. Received: {error}.") from None
    version = document.pop("format_version", None) if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: expected format_version {FORMAT_VERSION}. Received: {version!r:.80}. "
            "Use the version of amdim_tf that wrote it."
        )
    settings: dict[str, Any] = {}
    for section in SECTIONS:
        values = document.pop(section, None)
        if not isinstance(values, dict):
            raise UserError(f"{path}: expected a section {section!r} with settings.")
        settings.update(values)
    _check_list(path, "classes", document.get("classes"), MOST_CLASSES, str, "names")
    _check_list(path, "starts", document.get("starts", []), MOST_STARTS, dict, "records")
    missing = [name for name in SETTINGS if name not in settings]
    if missing:
        raise UserError(f"{path}: expected every setting; missing: {', '.join(missing)}.")
    try:
        return update(Config(), settings), document
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _check_list(path, name: str, value: Any, most: int, kind: type, items: str) -> None:
    is_list = isinstance(value, list) and len(value) <= most
    if not is_list or not all(isinstance(item, kind) for item in value):
        raise UserError(
            f"{path}: expected {name!r}, a list of at most {most} {items}. Received: {value!r:.80}."
        )
