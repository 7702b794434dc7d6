"""An index of features for similarity search: unit vectors, and the paths that they belong to.

INDEX/vectors.npy  float32 [N, D]: f1 of each image, divided by its length; read as a memory map.
INDEX/images.jsonl  a line per row of vectors: {"path", "label", "index"}.
INDEX/index.json  where the features come from.
Search is exact: the cosine similarity with every row, block by block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from amdim_tf import (
    decode,
    extraction,
    feature_directory,
    feature_model,
    feature_shards,
    records,
    safe_files,
    tfds_sets,
)
from amdim_tf.directory_locks import locked
from amdim_tf.errors import UserError
from amdim_tf.examples import ArraySource, Source
from amdim_tf.extraction import Request
from amdim_tf.neighbours import unit_rows

FORMAT = "amdim_tf index"
_VECTORS, _IMAGES, _FACTS = "vectors.npy", "images.jsonl", "index.json"
_OWN_NAMES = {_VECTORS, _IMAGES, _FACTS}
_LARGEST_FACTS = 2**26  # bytes of index.json, which names every class
_LARGEST_IMAGE = 2**30  # bytes of a file
_COPIED = ("saved_model", "dataset", "data_dir", "split", "classes")  # from the manifest
_BLOCK = 32768


def check_request(index, request: Request) -> None:
    """Refuses, before anything is extracted, an index that could not be made."""
    if "f1" not in request.outputs:
        raise UserError(
            f"--index: expected f1 among --outputs, to be searched. Received: "
            f"{', '.join(request.outputs)}."
        )
    _checked_target(
        index,
        {
            "--output": request.output,
            "--data_dir": request.data_dir,
            "--saved_model": request.saved_model,
        },
    )


def _checked_target(index, outside: dict[str, str]) -> pathlib.Path:
    target = feature_directory.checked_place("--index", index, outside)
    with feature_directory.refusing("--index", target):
        names = {path.name for path in target.iterdir()} if target.exists() else set()
    foreign = names - _OWN_NAMES if _is_index(target) else names
    if foreign:
        raise UserError(
            "--index: expected a new or empty directory, or an earlier index. Received: "
            f"{target}, which holds {', '.join(sorted(foreign)[:3])}."
        )
    return target


def _is_index(directory: pathlib.Path) -> bool:
    """Whether a directory's index.json is ours: other programs have files of that name too."""
    try:
        contents = safe_files.read_limited(directory / _FACTS, _LARGEST_FACTS)
        return json.loads(contents)["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def build(features, index) -> pathlib.Path:
    """Makes an index of the f1 in a finished directory of features; an earlier one is replaced.

    Args:
        features: the directory.
        index: directory of the index.

    Returns:
        The index's directory.
    """
    features = pathlib.Path(features)
    manifest = feature_directory.read_manifest(features)
    if len(manifest["shapes"].get("f1", ())) != 1:
        raise UserError(f"--index: expected f1 in {features}. Received: no such column.")
    target = _checked_target(index, {"--output": str(features)})
    with feature_directory.refusing("--index", target), _scratch_beside(target) as scratch:
        aside = scratch / "new"
        aside.mkdir()
        _write_rows(aside, features, manifest)
        facts = {name: manifest[name] for name in _COPIED}
        facts = {"format": FORMAT, "format_version": 1, "rows": manifest["rows"], **facts}
        (aside / _FACTS).write_text(json.dumps(facts, indent=2) + "\n")
        safe_files.put_directory(aside, target)
    print(f"Wrote {target}: an index of {manifest['rows']} images.")
    return target


@contextlib.contextmanager
def _scratch_beside(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty directory on the same disk, nobody else's until the end, when it is removed."""
    scratch = target.with_name(target.name + ".partial")
    with contextlib.suppress(FileExistsError):
        scratch.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        _check_scratch(scratch)
        began = scratch.stat().st_ino
        try:
            stack.enter_context(locked(scratch))
            # One that ended meanwhile has removed what is locked here, and a third may have begun.
            if scratch.stat().st_ino != began:
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            raise UserError(
                f"--index: expected a directory that nobody is writing. Received: {target}, which "
                "another process is making. Wait for it."
            ) from None
        try:
            _clear_leftovers(scratch, target)
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _check_scratch(scratch: pathlib.Path) -> None:
    """Refuses what is not, as far as its names tell, the leftover of a killed run."""
    own = not scratch.is_symlink() and scratch.is_dir()
    for part in scratch.iterdir() if own else ():
        own = own and part.name in ("new", "replaced") and not part.is_symlink() and part.is_dir()
        own = own and _OWN_NAMES.issuperset(path.name for path in part.iterdir())
    if not own:
        raise UserError(
            f"--index: expected to write to {scratch} first. Received: something else that is "
            "there already. Move it, or choose another --index."
        )


def _clear_leftovers(scratch: pathlib.Path, target: pathlib.Path) -> None:
    """Empties what a killed run left; an index that it had moved aside comes back."""
    if (scratch / "replaced").exists() and not target.exists():
        (scratch / "replaced").rename(target)
    for leftover in scratch.iterdir():
        shutil.rmtree(leftover)


def _write_rows(directory: pathlib.Path, features: pathlib.Path, manifest: dict) -> None:
    """Writes vectors.npy and images.jsonl, shard after shard.

    Vectors are written, not stored through a memory map: where a disk is full, that ends a program
    without a word.
    """
    shapes = {"f1": tuple(manifest["shapes"]["f1"])}
    header = {"descr": "<f4", "fortran_order": False, "shape": (manifest["rows"], *shapes["f1"])}
    with (directory / _VECTORS).open("wb") as vectors, (directory / _IMAGES).open("w") as file:
        np.lib.format.write_array_header_1_0(vectors, header)
        for shard in manifest["shards"]:
            rows = feature_shards.read(features / shard["name"], manifest["file_format"], shapes)
            if len(rows) != shard["rows"]:
                raise UserError(
                    f"{features / shard['name']}: expected {shard['rows']} rows, as "
                    f"{feature_directory.MANIFEST} says. Received: {len(rows)}. Remove it, and "
                    "run the same command again."
                )
            values = rows.outputs["f1"]
            if not np.isfinite(values).all():
                raise UserError(
                    f"{features / shard['name']}: expected finite numbers as f1. Received: NaN or "
                    "infinity. Has training diverged?"
                )
            vectors.write(unit_rows(values).astype("<f4").tobytes())
            for path, label, index in zip(
                rows.path, rows.label.tolist(), rows.index.tolist(), strict=True
            ):
                file.write(json.dumps({"path": path, "label": label, "index": index}) + "\n")


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """An image of an index that is similar to a query."""

    score: float
    path: str
    label: int
    index: int


@dataclasses.dataclass(frozen=True)
class Index:
    """An index on disk.

    Attributes:
        directory: where it is.
        vectors: float32 [N, D], a memory map.
        facts: what index.json says.
    """

    directory: pathlib.Path
    vectors: np.ndarray
    facts: dict[str, Any]

    def search(self, query: np.ndarray, k: int) -> list[Neighbour]:
        """The k most similar images to features [D], the most similar first.

        Of equally similar images the one with the lower row comes first. Fewer than k where the
        index has fewer.
        """
        if query.shape != self.vectors.shape[1:]:
            raise UserError(
                f"--index: expected features of {self.vectors.shape[1]} numbers. Received: a "
                f"SavedModel that gives {query.shape[0]}."
            )
        unit = unit_rows(query[np.newaxis])[0]
        scores = np.empty(0, np.float32)
        rows = np.empty(0, np.int64)
        for start in range(0, len(self.vectors), _BLOCK):
            block = self.vectors[start : start + _BLOCK] @ unit  # [b]
            if not np.isfinite(block).all():
                raise UserError(
                    f"{self.directory / _VECTORS}: expected finite numbers, and a query with "
                    "finite features. Received: NaN or infinity. Make the index again."
                )
            scores = np.concatenate([scores, block])
            rows = np.concatenate([rows, np.arange(start, start + len(block))])
            best = np.argsort(-scores, kind="stable")[:k]
            scores, rows = scores[best], rows[best]
        lines = self._lines(rows)
        return [
            Neighbour(float(score), **lines[row])
            for score, row in zip(scores, rows.tolist(), strict=True)
        ]

    def _lines(self, rows: np.ndarray) -> dict[int, dict]:
        """What images.jsonl says about some rows."""
        wanted = sorted(rows.tolist())
        found, done = {}, 0
        with (
            _refusing_damage(self.directory),
            _regular(self.directory / _IMAGES).open("rb") as file,
        ):
            for row in wanted:
                line = next(itertools.islice(file, row - done, None), b"")
                found[row], done = _parsed_line(line, self.directory / _IMAGES), row + 1
        return found


def _parsed_line(line: bytes, path: pathlib.Path) -> dict:
    try:
        document = json.loads(line)
        found = {name: document[name] for name in ("path", "label", "index")}
        numbers = (found["label"], found["index"])
        if type(found["path"]) is str and all(type(n) is int and -1 <= n < 2**62 for n in numbers):
            return found
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UserError(f"{path}: expected a line per image. Received: {line[:80]!r}.")


def load(directory) -> Index:
    """An index that `build` has written."""
    path = pathlib.Path(directory)
    with _refusing_damage(path):
        facts = json.loads(safe_files.read_limited(path / _FACTS, _LARGEST_FACTS))
        if facts["format"] != FORMAT or facts["format_version"] != 1:
            raise ValueError(f"format {facts['format']!r}, version {facts['format_version']!r}")
        _check_facts(facts)
        vectors = np.lib.format.open_memmap(_regular(path / _VECTORS), "r")
        if vectors.ndim != 2 or vectors.dtype != np.float32 or len(vectors) != facts["rows"]:
            raise ValueError(f"{_VECTORS} of {vectors.dtype} {list(vectors.shape)}")
    return Index(path, vectors, facts)


def _regular(path: pathlib.Path) -> pathlib.Path:
    """A file that is too large to be read at once; opening a pipe would wait for a writer."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is not a regular file")
    return path


def _check_facts(facts: dict[str, Any]) -> None:
    """Raises a KeyError or ValueError unless everything is there that a search asks for."""
    saved_model, *texts, classes = (facts[name] for name in _COPIED)
    texts += [saved_model["path"], saved_model["sha256"], *classes]
    known = type(classes) is list and "step" in saved_model
    if not known or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"other facts in {_FACTS}")


@contextlib.contextmanager
def _refusing_damage(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # parsers fail in more ways than can be listed
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"--index: expected what python -m amdim_tf.extract --index writes. Received: {path} "
            f"({reason})."
        ) from None


def features_of_query(index: Index, query: str, saved_model: str = "") -> np.ndarray:
    """The f1 [D] of an image file, by the model that the index was made with.

    Args:
        index: to be searched.
        query: path of the image.
        saved_model: where the model is, if it has been moved.
    """
    made_with = index.facts["saved_model"]
    directory = saved_model or made_with["path"]
    try:
        contents = safe_files.read_limited(pathlib.Path(query), _LARGEST_IMAGE)
    except OSError as error:
        raise UserError(
            f"--query: expected an image file. Received: {query} ({error.strerror or error})."
        ) from None
    if feature_model.identity(directory)["sha256"] != made_with["sha256"]:
        raise UserError(
            f"--saved_model: expected the model that {index.directory} was made with (step "
            f"{made_with['step']}). Received: {directory}, another one. Make the "
            "index again, with a new --output and --index."
        )
    features, good = feature_model.FeatureModel(directory, ["f1"]).of_files([contents])
    if not good.all():
        raise UserError(
            f"--query: expected a JPEG, PNG, BMP, GIF or WebP file. Received: {query}, which "
            "cannot be decoded."
        )
    return features["f1"][0]


def images_of(index: Index, neighbours: list[Neighbour]) -> list[np.ndarray | None]:
    """The pictures of neighbours, uint8 [H, W, 3]; None for one that is no longer there.

    Images that are no files of their own come from their data set.
    """
    facts = index.facts
    place = (facts["dataset"], facts["data_dir"], facts["split"])
    request, source = Request(facts["saved_model"]["path"], *place, output=""), None
    if not all(os.path.isfile(neighbour.path) for neighbour in neighbours) and not _is_tree(
        request
    ):
        with contextlib.suppress(UserError):  # data that has been moved
            source = extraction.load_source(request)
    return [_image_of(request, source, neighbour) for neighbour in neighbours]


def _is_tree(request: Request) -> bool:
    """Whether images are files in folders: to list them all would find none that is gone."""
    if request.dataset == "scenes" or request.dataset in tfds_sets.NAMES:
        return False
    split = "train" if request.split == "labelled" else request.split
    return not records.index_path(pathlib.Path(request.data_dir), split).exists()


def _image_of(request: Request, source: Source | None, neighbour: Neighbour) -> np.ndarray | None:
    number = neighbour.index
    if source is not None and (
        not 0 <= number < len(source)
        or extraction.name_of(request, source, number) != neighbour.path
    ):
        source = None  # data that has changed
    if isinstance(source, ArraySource):
        return source.images[neighbour.index]
    try:
        if os.path.isfile(neighbour.path):
            return image_file(neighbour.path)
        if source is not None:
            contents, _ = source.read(tf.constant(neighbour.index, tf.int64))
            return decode.decode(contents).numpy()
    except (OSError, tf.errors.OpError):
        pass
    return None


def image_file(path: str) -> np.ndarray:
    """The pixels of an image file, uint8 [H, W, 3]."""
    contents = safe_files.read_limited(pathlib.Path(path), _LARGEST_IMAGE)
    return decode.decode(tf.constant(contents)).numpy()
