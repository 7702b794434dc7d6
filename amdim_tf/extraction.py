"""extract(request): features of every image of a data set, from a SavedModel, as files.

Images keep their order. A shard is a fixed range of indices, and a batch a fixed range of a shard,
so that a run that was killed and resumed calls the model on the same batches as one that was not:
the last digits of a feature depend on the batch that it was computed in.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from amdim_tf import config as config_lib
from amdim_tf import decode, feature_directory, feature_model, feature_shards, sources
from amdim_tf.errors import Interrupted, UserError
from amdim_tf.examples import UNLABELLED, ArraySource, Source
from amdim_tf.feature_directory import Contents, FeatureDirectory
from amdim_tf.feature_model import FeatureModel
from amdim_tf.feature_shards import Rows
from amdim_tf.progress import Progress
from amdim_tf.signals import StopSignals

# Batches under way at once: one is read and decoded while another is in the model.
_BATCHES_AT_ONCE = 3


@dataclasses.dataclass(frozen=True)
class Request:
    """What to extract, and where to.

    Attributes:
        saved_model: directory of an export.
        dataset, data_dir, split: which images.
        output: directory for the features.
        format: npz, tfrecord or parquet.
        outputs: names among the export's maps.
        batch_size: images in a call of the model.
        shard_size: images in a file.
    """

    saved_model: str
    dataset: str
    data_dir: str
    split: str
    output: str
    format: str = "npz"
    outputs: tuple[str, ...] = ("f1",)
    batch_size: int = 250
    shard_size: int = 2000


@dataclasses.dataclass(frozen=True)
class Job:
    """An extraction that is ready to run: its images, its model and its directory."""

    request: Request
    source: Source
    model: FeatureModel
    directory: FeatureDirectory

    def name_of(self, index: int) -> str:
        """The path of an image, or its place in a data set without files."""
        return name_of(self.request, self.source, index)


def extract(request: Request, run: Callable[[Job], None] | None = None) -> dict:
    """Extracts what is missing in the output directory.

    Args:
        request: what and where.
        run: writes the missing shards; by default in this process.

    Returns:
        The manifest.
    """
    with prepared(request) as job:
        directory = job.directory
        if directory.finished:
            manifest = feature_directory.read_manifest(directory.path)
            print(f"{directory.path}: already complete, {_summary(manifest)}.")
            return manifest
        (run or run_here)(job)
        manifest = directory.finish(job.source.skipped, job.name_of)
    print(f"Wrote {directory.path}: {_summary(manifest)}.")
    if manifest["skipped"]:
        path = directory.path / feature_directory.SKIPPED
        print(
            f"{manifest['skipped']} images could not be decoded: see {path}. To try them again, "
            "remove --output first."
        )
    return manifest


def _summary(manifest: dict) -> str:
    return (
        f"{', '.join(manifest['shapes'])} of {manifest['rows']} images in "
        f"{len(manifest['shards'])} shards"
    )


@contextlib.contextmanager
def prepared(request: Request) -> Iterator[Job]:
    """Checks a request, loads what it names, and opens its directory until the end."""
    feature_shards.check_available(request.format)
    for name in ("batch_size", "shard_size"):
        if getattr(request, name) < 1:
            raise UserError(f"--{name}: expected at least 1. Received: {getattr(request, name)}.")
    # Workers may be started in other directories.
    request = dataclasses.replace(request, saved_model=os.path.abspath(request.saved_model))
    if request.data_dir:
        request = dataclasses.replace(request, data_dir=os.path.abspath(request.data_dir))
    inputs = {"--data_dir": request.data_dir, "--saved_model": request.saved_model}
    path = feature_directory.checked_place("--output", request.output, inputs)
    feature_directory.check_contents(path)
    identity = feature_model.identity(request.saved_model)
    model = FeatureModel(request.saved_model, request.outputs)
    feature_model.check_same(request.saved_model, identity["sha256"])
    source = load_source(request)
    contents = Contents(
        saved_model=identity,
        dataset=request.dataset,
        data_dir=request.data_dir,
        split=request.split,
        images=len(source),
        names_sha256=names_digest(request, source),
        classes=source.class_names,
        format=request.format,
        shapes=model.shapes,
        batch_size=request.batch_size,
        shard_size=request.shard_size,
    )
    with feature_directory.opened(path, contents) as directory:
        yield Job(request, source, model, directory)


def load_source(request: Request) -> Source:
    """The images of a request, files as files."""
    # Bad images are skipped, however many they are. Scenes are made in the encoder's size.
    settings = {"dataset": request.dataset, "data_dir": request.data_dir, "max_bad_images": 1.0}
    known = feature_model.metadata(request.saved_model).get("config", {})
    size = known.get("data", {}).get("image_size") if isinstance(known, dict) else None
    if request.dataset == "scenes" and size in config_lib.ENCODER_SIZES:
        settings["image_size"] = size
    source = sources.load(config_lib.make(settings).data, request.split, files_as_files=True)
    if not len(source):
        raise UserError(f"--data_dir: expected images of {request.dataset}. Received: none.")
    return source


def name_of(request: Request, source: Source, index: int) -> str:
    """The path of an image, or its place in a data set without files."""
    if isinstance(source, ArraySource):
        return f"{request.dataset}/{request.split}/{index}"
    return source.name_of(index)


def names_digest(request: Request, source: Source) -> str:
    """A digest of the names of all images, in order, with size and time of the files they are in.

    Every process that sees the same files has the same digest.
    """
    digest = hashlib.sha256()
    for index in range(len(source)):
        stamp = b"" if isinstance(source, ArraySource) else _stamp(source.file_of(index))
        digest.update(os.fsencode(name_of(request, source, index)) + stamp + b"\n")
    return digest.hexdigest()


def _stamp(path: str) -> bytes:
    """What changes with the contents of a file; nothing where it is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return b""
    return b" %d %d" % (status.st_size, status.st_mtime_ns)


def run_here(job: Job) -> None:
    """Writes the missing shards, one after the other."""
    directory, size = job.directory, job.request.batch_size
    missing = directory.missing_shards()
    batches = [
        (shard, indices[start : start + size])
        for shard in missing
        for indices in [directory.indices_of(shard)]
        for start in range(0, len(indices), size)
    ]
    done = len(job.source) - sum(len(directory.indices_of(shard)) for shard in missing)
    if done:
        print(
            f"Going on after {done} of {len(job.source)} images. To try again what could not be "
            "read among them, remove --output first."
        )
    read = batch_reader(job.source)
    parts, began, first = [], time.monotonic(), done
    with (
        StopSignals() as signals,
        Progress(len(job.source), "extract", "image", start=done) as progress,
        contextlib.closing(_in_order(lambda batch: _rows_of(job, read, batch[1]), batches)) as rows,
    ):
        for (shard, indices), part in zip(batches, rows, strict=True):
            parts.append(part)
            if indices.stop == directory.indices_of(shard).stop:
                feature_shards.write(directory.shard_path(shard), job.request.format, joined(parts))
                parts = []
            done += len(indices)
            progress.show(f"{(done - first) / (time.monotonic() - began):.0f} images/s")
            progress.advance(len(indices))
            if signals.received and done < len(job.source):
                left = len(directory.missing_shards())
                raise Interrupted(
                    f"Stopped by {signals.received} with {directory.shard_count - left} of "
                    f"{directory.shard_count} shards written. The same command goes on from here."
                )


def _in_order(function: Callable, arguments: list) -> Iterator:
    """Calls a function on each argument, in order, a few at a time in threads of their own."""
    with ThreadPoolExecutor(_BATCHES_AT_ONCE) as pool:
        waiting: collections.deque = collections.deque()
        try:
            for argument in arguments:
                waiting.append(pool.submit(function, argument))
                if len(waiting) > _BATCHES_AT_ONCE:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _rows_of(job: Job, read: Callable, indices: range) -> Rows:
    """Features of the images of a batch, without those that cannot be decoded."""
    images, labels = read(indices)
    if isinstance(job.source, ArraySource):
        outputs, good = job.model.of_images(images), np.ones(len(indices), bool)
    else:
        outputs, good = job.model.of_files(images)
    kept = np.array(indices, np.int64)[good]
    return Rows(kept, [job.name_of(int(index)) for index in kept], labels[good], outputs)


def batch_reader(source: Source) -> Callable[[range], tuple]:
    """A function from indices to (pixels [n, H, W, 3] or n files, labels int32 [n]).

    A file that cannot be read is an empty one, which cannot be decoded.
    """
    if isinstance(source, ArraySource):

        def read_array(indices: range):
            rows = slice(indices.start, indices.stop)
            return source.images[rows], source.labels[rows]

        return read_array

    signature = [tf.TensorSpec([None], tf.int64)]
    read_all = tf.function(source.read, input_signature=signature)

    @tf.function(input_signature=signature)
    def read_each(indices):
        nothing = (tf.constant(b""), tf.constant(UNLABELLED))
        return tf.map_fn(
            lambda index: decode.or_else(source.read, index, nothing)[0],
            indices,
            fn_output_signature=(tf.string, tf.int32),
        )

    def read_files(indices: range):
        numbers = tf.constant(indices, tf.int64)
        try:
            files, labels = read_all(numbers)
        except tf.errors.OpError:
            files, labels = read_each(numbers)
        return files.numpy(), labels.numpy()

    return read_files


def joined(parts: list[Rows]) -> Rows:
    """The rows of several batches as one."""
    return Rows(
        np.concatenate([part.index for part in parts]),
        [path for part in parts for path in part.path],
        np.concatenate([part.label for part in parts]),
        {name: np.concatenate([part.outputs[name] for part in parts]) for name in parts[0].outputs},
    )
