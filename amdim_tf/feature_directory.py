"""The directory that an extraction fills: shards, a list of skipped images, and a manifest.

While it is being filled, unfinished.json holds what was asked for, so that the same command goes on
where it stopped and another is refused. Shards have their own names only when they are whole. The
manifest comes last: where it is, everything is there. No file holds a date, so that a run that was
stopped and resumed leaves the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from amdim_tf import feature_shards, safe_files
from amdim_tf.directory_locks import locked
from amdim_tf.errors import UserError, warn
from amdim_tf.examples import SkippedImages

MANIFEST, UNFINISHED, SKIPPED = "manifest.json", "unfinished.json", "skipped_images.txt"
FORMAT = "amdim_tf features"
_LARGEST_JSON = 2**28  # bytes; it names every class and every shard
_SHARD_NAME = re.compile(rf"features-\d+-of-\d+\.({'|'.join(feature_shards.KINDS)})")
_OWN_NAME = re.compile(
    rf"({re.escape(MANIFEST)}|{re.escape(UNFINISHED)}|{re.escape(SKIPPED)}"
    rf"|{_SHARD_NAME.pattern}({re.escape(feature_shards.ROWS)})?)"
    rf"({re.escape(feature_shards.PARTIAL)})?"
)


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a directory of features is to hold.

    Attributes:
        saved_model: {"path", "sha256", "step"}.
        dataset, data_dir, split: which images.
        images: how many there are.
        names_sha256: digest of their names, and of size and time of the files they are in.
        classes: names of the labels 0, 1, ….
        format: of the shards.
        shapes: of each output, of one image.
        batch_size: images in a call of the model, which the last digits depend on.
        shard_size: images in a shard, those included that are skipped.
    """

    saved_model: dict[str, Any]
    dataset: str
    data_dir: str
    split: str
    images: int
    names_sha256: str
    classes: tuple[str, ...]
    format: str
    shapes: dict[str, tuple[int, ...]]
    batch_size: int
    shard_size: int

    def document(self) -> dict[str, Any]:
        """The same for a JSON file."""
        values = {"format": FORMAT, "format_version": 1}
        for field in dataclasses.fields(self):
            values["file_format" if field.name == "format" else field.name] = getattr(
                self, field.name
            )
        return json.loads(json.dumps(values))


class FeatureDirectory:
    """A directory with shards of `contents`, whole or in part.

    Args:
        path: of the directory.
        contents: what it holds when it is finished.
    """

    def __init__(self, path: pathlib.Path, contents: Contents):
        self.path, self.contents = path, contents
        self.shard_count = -(-contents.images // contents.shard_size)

    def shard_path(self, shard: int) -> pathlib.Path:
        """Where a shard is."""
        name = f"features-{shard:05d}-of-{self.shard_count:05d}.{self.contents.format}"
        return self.path / name

    def indices_of(self, shard: int) -> range:
        """The images of a shard."""
        size = self.contents.shard_size
        return range(shard * size, min((shard + 1) * size, self.contents.images))

    def missing_shards(self) -> list[int]:
        """Those that are still to be written."""
        return [shard for shard in range(self.shard_count) if not self.shard_path(shard).exists()]

    @property
    def finished(self) -> bool:
        """Whether everything is there."""
        return (self.path / MANIFEST).exists()

    def finish(self, skipped: SkippedImages, name_of: Callable[[int], str]) -> dict[str, Any]:
        """Lists the skipped images, then writes the manifest and returns it.

        What is not in the shards has been skipped: so nothing else needs to be remembered by a
        run that may be killed.

        Args:
            skipped: where the names are added.
            name_of: of an image.
        """
        shards = []
        for shard in range(self.shard_count):
            path, wanted = self.shard_path(shard), self.indices_of(shard)
            there = feature_shards.indices(path, self.contents.format, wanted)
            for index in np.setdiff1d(wanted, there):
                skipped.add(name_of(int(index)))
            shards.append(
                {
                    "name": path.name,
                    "first_index": wanted.start,
                    "rows": len(there),
                    "bytes": path.stat().st_size,
                }
            )
        skipped.write(self.path / SKIPPED)
        rows = sum(shard["rows"] for shard in shards)
        if not rows:
            raise UserError(
                f"--data_dir: expected images that can be decoded. Received: {len(skipped.names)} "
                f"that cannot, listed in {self.path / SKIPPED}. To try them again, remove --output "
                "first."
            )
        manifest = {
            **self.contents.document(),
            "rows": rows,
            "skipped": self.contents.images - rows,
            "columns": self._columns(),
            "shards": shards,
        }
        _write_json(self.path / MANIFEST, manifest)
        _remove_notes(self.path)
        return manifest

    def _columns(self) -> dict[str, dict]:
        outputs = {
            name: {"dtype": "float32", "shape": list(shape)}
            for name, shape in self.contents.shapes.items()
        }
        return {
            "index": {"dtype": "int64", "shape": []},
            "path": {"dtype": "string", "shape": []},
            "label": {"dtype": "int32", "shape": []},
            **outputs,
        }


def read_manifest(path: pathlib.Path) -> dict[str, Any]:
    """The manifest of a finished directory."""
    document = _read_json(path / MANIFEST)
    if document is None:
        raise UserError(
            f"{path}: expected finished features, with {MANIFEST}. Received: none. Extract first."
        )
    fault = _fault_of(document)
    if fault:
        raise UserError(
            f"{path / MANIFEST}: expected what python -m amdim_tf.extract writes. Received: "
            f"{fault}. {_anew(path)}"
        )
    return document


def _anew(path: pathlib.Path) -> str:
    """What to do where the notes are damaged: without them nobody knows what the shards are."""
    return f"Remove the whole directory {path}, and extract again."


def _fault_of(manifest: dict[str, Any]) -> str:
    """What is wrong in a manifest; nothing where all is well that readers rely on."""
    texts = [manifest.get(name) for name in ("dataset", "data_dir", "split", "file_format")]
    texts += [manifest["saved_model"].get(name) for name in ("path", "sha256")]
    shapes, shards, classes = (manifest.get(name) for name in ("shapes", "shards", "classes"))
    if type(classes) is not list or not all(type(text) is str for text in (*texts, *classes)):
        return "no text where there should be one"
    if "step" not in manifest["saved_model"] or not _is_count(manifest.get("skipped")):
        return "no step, or no number of skipped images"
    if type(shapes) is not dict or not all(
        type(shape) is list and all(map(_is_count, shape)) for shape in shapes.values()
    ):
        return "shapes that are no lists of whole numbers"
    if type(shards) is not list or not all(type(shard) is dict for shard in shards):
        return "no list of shards"
    for shard in shards:
        name = shard.get("name")
        if type(name) is not str or not _SHARD_NAME.fullmatch(name):
            return "a shard without a shard's name"
        if not name.endswith(f".{manifest['file_format']}") or not _is_count(shard.get("rows")):
            return f"{name} of another format, or without rows"
        if not _is_count(shard.get("bytes", 0)):  # earlier manifests have none
            return f"{name} with bytes that are no whole number"
    rows, total = manifest.get("rows"), sum(shard["rows"] for shard in shards)
    return "" if _is_count(rows) and rows == total else f"other rows than the shards' {total}"


def _is_count(value) -> bool:
    return type(value) is int and 0 <= value < 2**48


@contextlib.contextmanager
def opened(path: pathlib.Path, contents: Contents) -> Iterator[FeatureDirectory]:
    """The directory, ready to be filled, and nobody else's until the end.

    It is made if need be; files that a killed run left half-written are removed. A finished one
    whose shards are not all there as they were written is unfinished again, without the others.
    """
    with refusing("--output", path):
        path.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        _check_same(path, contents)
        with refusing("--output", path):
            for leftover in path.glob(f"*{feature_shards.PARTIAL}"):
                leftover.unlink()
            directory = FeatureDirectory(path, contents)
            if directory.finished:
                _drop_damaged(directory)
            if not directory.finished:
                _write_json(path / UNFINISHED, contents.document())
            else:
                _remove_notes(path)
            yield directory


def _drop_damaged(directory: FeatureDirectory) -> None:
    """Removes shards of a finished directory that are not what its manifest says, and then that.

    In this order: whatever is killed in between, a shard is missing, and the next run notices.
    """
    path = directory.path
    shards = read_manifest(path)["shards"]
    names = [directory.shard_path(shard).name for shard in range(directory.shard_count)]
    if [shard["name"] for shard in shards] != names:
        raise UserError(
            f"{path / MANIFEST}: expected the {len(names)} shards of its images. Received: others. "
            f"{_anew(path)}"
        )
    damaged = [path / shard["name"] for shard in shards if not _is_whole(path, shard)]
    if not damaged:
        return
    warn(
        f"{path}: {len(damaged)} of {len(names)} shards are missing or of another size than "
        f"{MANIFEST} says, the first {damaged[0].name}; they are extracted again."
    )
    for shard_path in damaged:
        shard_path.unlink(missing_ok=True)
    (path / SKIPPED).unlink(
        missing_ok=True
    )  # written anew at the end, if there is anything to list
    _write_json(path / UNFINISHED, directory.contents.document())
    (path / MANIFEST).unlink()


def _is_whole(path: pathlib.Path, shard: dict[str, Any]) -> bool:
    """Whether a shard is there, in the size that the manifest says if it says one."""
    file = path / shard["name"]
    return file.is_file() and file.stat().st_size == shard.get("bytes", file.stat().st_size)


def _remove_notes(path: pathlib.Path) -> None:
    """Removes what only a directory needs that is being filled."""
    for note in (path / UNFINISHED, *path.glob(f"features-*{feature_shards.ROWS}")):
        note.unlink(missing_ok=True)


@contextlib.contextmanager
def refusing(flag: str, path: pathlib.Path) -> Iterator[None]:
    """Turns a failure to write into one line that names the flag."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{flag}: expected a directory with room and permission to write. Received: {path} "
            f"({error.strerror or error})."
        ) from None


def checked_place(flag: str, path, outside: dict[str, str]) -> pathlib.Path:
    """The real path of a directory to write, if it is in nobody's way.

    Args:
        flag: that gives it.
        path: its value.
        outside: flag -> directory that it must not be, or be inside of.
    """
    if "://" in str(path):
        raise UserError(f"{flag}: expected a directory on this machine. Received: {path}.")
    real = pathlib.Path(os.path.realpath(path))
    for other_flag, other in outside.items():
        if other and real.is_relative_to(os.path.realpath(other)):
            raise UserError(
                f"{flag}: expected a directory outside {other_flag}={other}. Received: {path}."
            )
    if real.exists() and not real.is_dir():
        raise UserError(f"{flag}: expected a directory. Received: {path}, which is a file.")
    return real


def check_contents(path: pathlib.Path) -> None:
    """Refuses a directory that holds something other than features."""
    with refusing("--output", path):
        names = sorted(os.listdir(path)) if path.exists() else []
    foreign = [name for name in names if not _OWN_NAME.fullmatch(name)]
    if not foreign and not {MANIFEST, UNFINISHED} & set(names):
        foreign = [name for name in names if not name.endswith(feature_shards.PARTIAL)]
    if foreign:
        raise UserError(
            "--output: expected a new or empty directory, or one that this command was filling. "
            f"Received: {path}, which holds {', '.join(foreign[:3])}."
        )


def _check_same(path: pathlib.Path, contents: Contents) -> None:
    """Refuses a directory that is for something else than `contents`."""
    check_contents(path)
    there = _read_json(path / MANIFEST) or _read_json(path / UNFINISHED)
    if there is None:
        return
    wanted = contents.document()
    if there["saved_model"].get("sha256") == wanted["saved_model"]["sha256"]:
        there["saved_model"] = wanted["saved_model"]  # it may have been moved
    flags = {"names_sha256": "names, sizes or times of the images", "file_format": "--format"}
    flags |= {"shapes": "--outputs", "images": "number of images", "classes": "classes"}
    different = [
        f"{flags.get(name, '--' + name)} {_shown(name, value)} (there: "
        f"{_shown(name, there.get(name))})"
        for name, value in wanted.items()
        if there.get(name) != value
    ]
    if different:
        raise UserError(
            f"--output: {path} holds features of something else: {'; '.join(different)}. Use "
            "another --output, or the settings that it was begun with."
        )


def _shown(name: str, value) -> str:
    """A setting, for an error."""
    if name == "saved_model" and isinstance(value, dict):
        return f"{value.get('path')}, step {value.get('step')}, {str(value.get('sha256'))[:12]}"
    if name == "shapes" and isinstance(value, dict):
        return ",".join(value)
    return str(value)[:60]


def _read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """A manifest, or what was asked for; None where there is no such file."""
    try:
        document = json.loads(safe_files.read_limited(path, _LARGEST_JSON))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(
            f"{path}: expected readable JSON. Received: {error.strerror or error}. "
            "Make it readable, or extract to another directory."
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: expected readable JSON. Received: {error}. {_anew(path.parent)}"
        ) from None
    if (
        not isinstance(document, dict)
        or document.get("format") != FORMAT
        or document.get("format_version") != 1
        or not isinstance(document.get("saved_model"), dict)
    ):
        raise UserError(
            f"{path}: expected what python -m amdim_tf.extract writes, version 1. Received: "
            f"something else. {_anew(path.parent)}"
        )
    return document


def _write_json(path: pathlib.Path, document: dict[str, Any]) -> None:
    safe_files.write_whole(path, (json.dumps(document, indent=2) + "\n").encode())


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(path))
        except BlockingIOError:
            raise UserError(
                f"--output: expected a directory that nobody is writing. Received: {path}, which "
                "another extraction is filling."
            ) from None
        yield
