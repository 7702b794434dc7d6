"""A run's checkpoints on disk: CHECKPOINTS/step-00001000/{NAME.npz …, manifest.json}.

A checkpoint is written aside as step-N.partial, checked, and made current by one rename: what has
the name step-N is whole. The manifest has a digest of every file and of itself, so that damage done
later is found. Arrays are read without pickle: nothing in a checkpoint can run code.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
import shutil
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from amdim_tf import safe_files

FORMAT_VERSION = 1
_MANIFEST = "manifest.json"
_MANIFEST_BYTES = 2**20
_STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})")
_PARTIAL, _DAMAGED = ".partial", ".damaged"
# What a header and a place in the table of contents add to an array, with room to spare.
_ENTRY_BYTES = 4096


class Damaged(Exception):
    """A checkpoint is not as it was written; the message says how."""


def path_of(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Where the checkpoint of a step is."""
    return directory / f"step-{step:08d}"


def steps_in(directory: pathlib.Path) -> list[int]:
    """The steps that have a checkpoint, whole or damaged, in rising order. Links do not count."""
    if not directory.parent.is_dir():
        return []
    try:
        entries = list(directory.iterdir())
    except FileNotFoundError:
        return []
    folders = (entry.name for entry in entries if entry.is_dir() and not entry.is_symlink())
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, folders) if match)


def write(
    directory: pathlib.Path,
    step: int,
    groups: Mapping[str, Mapping[str, np.ndarray]],
    facts: dict[str, Any],
) -> None:
    """Writes the checkpoint of a step.

    Args:
        directory: the run's checkpoints; it is made if need be.
        step: its number.
        groups: file name without ending -> array name -> array.
        facts: what else the manifest says.

    Raises:
        OSError: where it cannot be written; nothing new is current then.
        Damaged: where what comes back from the disk is not what was written.
    """
    final = path_of(directory, step)
    aside = final.with_name(final.name + _PARTIAL)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        _remove(aside)
        aside.mkdir()
        files = {}
        for name, arrays in groups.items():
            path = aside / f"{name}.npz"
            _write_arrays(path, arrays)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
        manifest = {"format_version": FORMAT_VERSION, "step": step, **facts, "files": files}
        manifest["sha256"] = _digest_of_manifest(manifest)
        safe_files.write_whole(aside / _MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        aside.rename(final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    safe_files.sync_directory(directory)


def _write_arrays(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an .npz file and reads it back, by which every array's own checksum is compared."""
    with safe_files.create(path) as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)
        safe_files.sync(file)
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise Damaged(f"{path.name}: {bad} differs from what was written")


def _digest(path: pathlib.Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _digest_of_manifest(manifest: dict[str, Any]) -> str:
    """SHA-256 of all fields but the digest itself, whatever their order and spacing."""
    fields = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: pathlib.Path, step: int) -> dict[str, Any]:
    """The manifest of a step, which is as it was written.

    Raises:
        Damaged: where it is not.
        FileNotFoundError: where the whole checkpoint is gone.
    """
    path = path_of(directory, step)
    try:
        manifest = json.loads(safe_files.read_limited(path / _MANIFEST, _MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        if not path.exists():
            raise FileNotFoundError(path) from None
        raise Damaged(f"{_MANIFEST}: {_reason(error)}") from None
    if not isinstance(manifest, dict) or manifest.get("sha256") != _digest_of_manifest(manifest):
        raise Damaged(f"{_MANIFEST}: its digest differs")
    if manifest.get("step") != step:
        raise Damaged(f"{_MANIFEST}: it is of step {manifest.get('step')}")
    return manifest


def read_arrays(
    directory: pathlib.Path, manifest: dict[str, Any], name: str, most_bytes: int
) -> dict[str, np.ndarray]:
    """The arrays of one file of a checkpoint, after its digest has been compared.

    Args:
        directory: the run's checkpoints.
        manifest: as `read_manifest` gives it.
        name: of the file, without ending.
        most_bytes: what all arrays together may have.

    Raises:
        Damaged: where the file is not as it was written, or too large.
        FileNotFoundError: where the whole checkpoint is gone.
    """
    folder = path_of(directory, manifest["step"])
    path = folder / f"{name}.npz"
    try:
        wanted = manifest["files"][path.name]
        if not path.is_file() or path.stat().st_size != wanted["bytes"]:
            raise ValueError(f"expected a file of {wanted['bytes']} bytes")
        if _digest(path) != wanted["sha256"]:
            raise ValueError("its digest differs")
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(one.compress_type != zipfile.ZIP_STORED or one.flag_bits & 1 for one in entries):
                raise ValueError("expected arrays that are neither compressed nor encrypted")
            if sum(entry.file_size - _ENTRY_BYTES for entry in entries) > most_bytes:
                raise ValueError(f"expected at most {most_bytes} bytes of arrays")
            return {
                entry.filename.removesuffix(".npy"): _read_array(archive, entry)
                for entry in entries
            }
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile, MemoryError) as error:
        if not folder.exists():
            raise FileNotFoundError(folder) from None
        raise Damaged(f"{path.name}: {_reason(error)}") from None


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _reason(error: Exception) -> str:
    strerror = getattr(error, "strerror", None)
    return strerror or " ".join(str(error).split())[:200] or type(error).__name__


def keep(directory: pathlib.Path, newest: int, every: int) -> None:
    """Removes all checkpoints but the newest ones and those of steps that `every` divides."""
    for step in steps_in(directory)[:-newest]:
        if not every or step % every:
            path = path_of(directory, step)
            # Under another name first: a checkpoint that is being removed is none any more.
            aside = path.with_name(path.name + _PARTIAL)
            path.rename(aside)
            _remove(aside)


def set_aside(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Renames a damaged checkpoint, so that its step can be saved again; returns where it is."""
    path = path_of(directory, step)
    aside = path.with_name(path.name + _DAMAGED)
    _remove(aside)
    return path.rename(aside)


def remove_leftovers(directory: pathlib.Path) -> None:
    """Removes what a process that was killed left half written or half removed."""
    for path in directory.glob(f"step-*{_PARTIAL}"):
        _remove(path)


def _remove(path: pathlib.Path) -> None:
    """Removes a directory, a file, or a link (not what it points at), if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
