"""The same extraction as an Apache Beam pipeline, for many workers.

Index ranges are shuffled to the workers, which list the data set for themselves, read their images,
and call the model in batches, loaded once per worker process. What cannot be decoded leaves by an
output of its own. Rows are grouped by shard and written as the local extraction writes them, so
that either can go on with what the other has begun; workers need to see the same directories.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import numpy as np

from amdim_tf import extraction, feature_directory, feature_model, feature_shards
from amdim_tf.errors import Interrupted, UserError
from amdim_tf.extraction import Job, Request
from amdim_tf.feature_model import FeatureModel
from amdim_tf.feature_shards import Rows

try:
    import apache_beam as beam
    from apache_beam.ml.inference.base import KeyedModelHandler, ModelHandler, RunInference
    from apache_beam.options.pipeline_options import PipelineOptions
except ImportError:
    raise UserError(
        "--runner=beam: expected apache-beam; it is not installed. "
        "Run: pip install -r requirements-beam.txt"
    ) from None

_NAMESPACE = "amdim_tf"
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception)\b.*: ")  # the line that ends a traceback
_LOG_LEVEL = "--default_sdk_harness_log_level"
_QUIET = (f"{_LOG_LEVEL}=WARNING",)  # an option that is given later wins


@dataclasses.dataclass(frozen=True)
class _Image:
    """What is known of an image before it is read; the key of its features."""

    index: int
    path: str
    label: int


class SavedModelHandler(ModelHandler):
    """Gives Beam's RunInference the features of an exported SavedModel.

    An example is a file, as bytes, or pixels, uint8 [H, W, 3] of one size. Its result is
    {output name: float32 array}, or None for a file that cannot be decoded.

    Args:
        saved_model: directory of the export.
        outputs: names of the features.
        batch_size: most images in a call.
        sha256: digest of the export, which every worker has to find.
    """

    def __init__(self, saved_model: str, outputs: tuple[str, ...], batch_size: int, sha256: str):
        super().__init__()
        self._saved_model, self._outputs, self._batch_size = saved_model, outputs, batch_size
        self._sha256 = sha256

    def load_model(self) -> FeatureModel:
        """Called once per worker process."""
        model = FeatureModel(self._saved_model, self._outputs)
        feature_model.check_same(self._saved_model, self._sha256)  # after: it was loaded from this
        return model

    def run_inference(self, batch: Sequence, model: FeatureModel, inference_args=None) -> Iterable:
        """The features of each example of a batch."""
        del inference_args
        beam.metrics.Metrics.counter(_NAMESPACE, "batches").inc()
        if isinstance(batch[0], np.ndarray):
            outputs, good = model.of_images(np.stack(batch)), np.ones(len(batch), bool)
        else:
            outputs, good = model.of_files(batch)
        row_of = np.cumsum(good) - 1
        for is_good, row in zip(good, row_of, strict=True):
            yield {name: value[row] for name, value in outputs.items()} if is_good else None

    def batch_elements_kwargs(self) -> dict:
        """Batches as large as the local extraction's, where a bundle has as many images."""
        return {"min_batch_size": self._batch_size, "max_batch_size": self._batch_size}

    def get_metrics_namespace(self) -> str:
        """Where RunInference counts."""
        return _NAMESPACE


@functools.lru_cache(maxsize=1)
def _source_of(request: Request, names_sha256: str):
    """The worker's own list of the images and a function that reads them, once per process."""
    source = extraction.load_source(request)
    if extraction.names_digest(request, source) != names_sha256:
        raise UserError(
            f"--data_dir: expected the same images on every worker. Received: others in "
            f"{request.data_dir or request.dataset}."
        )
    return source, extraction.batch_reader(source)


class _Read(beam.DoFn):
    """(first, end) of a range of images -> (_Image, its file or pixels)."""

    def __init__(self, request: Request, names_sha256: str):
        super().__init__()
        self._request, self._names_sha256 = request, names_sha256

    def process(self, bounds: tuple[int, int]):
        """Reads a range."""
        source, read = _source_of(self._request, self._names_sha256)
        indices = range(*bounds)
        images, labels = read(indices)
        for index, image, label in zip(indices, images, labels.tolist(), strict=True):
            path = extraction.name_of(self._request, source, index)
            yield _Image(index, path, label), image


class _SplitByResult(beam.DoFn):
    """(_Image, features or None) -> rows by shard, and by the output "undecodable" bad images."""

    def __init__(self, shard_size: int):
        super().__init__()
        self._shard_size = shard_size
        self._counters = {
            name: beam.metrics.Metrics.counter(_NAMESPACE, name)
            for name in ("images", "undecodable")
        }

    def process(self, element):
        """Sends one image its way."""
        image, outputs = element
        shard = image.index // self._shard_size
        if outputs is None:
            self._counters["undecodable"].inc()
            yield beam.pvalue.TaggedOutput("undecodable", (shard, image))
        else:
            self._counters["images"].inc()
            yield shard, (image, outputs)


class _WriteShard(beam.DoFn):
    """(shard, its rows) -> a file; a second attempt writes the same file again."""

    def __init__(self, directory: feature_directory.FeatureDirectory):
        super().__init__()
        self._directory = directory

    def process(self, element):
        """Writes one shard, in the order of the images."""
        shard, groups = element
        rows = sorted(groups["rows"], key=lambda row: row[0].index)
        contents = self._directory.contents
        outputs = {
            name: np.array([features[name] for _, features in rows], np.float32).reshape(
                len(rows), *shape
            )
            for name, shape in contents.shapes.items()
        }
        images = [image for image, _ in rows]
        columns = Rows(
            np.array([image.index for image in images], np.int64),
            [image.path for image in images],
            np.array([image.label for image in images], np.int32),
            outputs,
        )
        feature_shards.write(self._directory.shard_path(shard), contents.format, columns)
        yield shard


def run(job: Job, options: Sequence[str]) -> None:
    """Writes the missing shards of a job, and prints what the pipeline counted.

    Args:
        job: the extraction.
        options: Beam's own, such as --runner=FlinkRunner.
    """
    directory = job.directory
    ranges = [
        (start, min(start + job.request.batch_size, indices.stop))
        for shard in directory.missing_shards()
        for indices in [directory.indices_of(shard)]
        for start in range(indices.start, indices.stop, job.request.batch_size)
    ]
    pipeline = new_pipeline(options)
    add_steps(pipeline, job, ranges)
    result = None
    with _quiet(options), _interrupting(), _refusing_failures():
        try:
            result = pipeline.run()
            result.wait_until_finish()
        except Interrupted:
            with contextlib.suppress(Exception):  # not every runner can, or is there yet
                result.cancel()
            raise
    print(f"Beam counted: {_counted(result.metrics())}.")


def new_pipeline(options: Sequence[str]) -> beam.Pipeline:
    """An empty pipeline, if Beam knows all of its options."""
    flags = [*_QUIET, *options]

    def check(parser):
        # Beam would print its whole usage and exit, and leave out what it does not know.
        parser.error = _refuse_options
        unknown = parser.parse_known_args(flags)[1]
        if unknown:
            _refuse_options(f"unknown {' '.join(unknown)}")

    PipelineOptions(flags).get_all_options(add_extra_args_fn=check)
    try:
        return beam.Pipeline(options=PipelineOptions(flags))
    except (ValueError, ImportError, AttributeError) as error:  # of a runner that is not there
        _refuse_options(str(error))


def _refuse_options(reason: str) -> NoReturn:
    reason = " ".join(reason.split())[:300].rstrip(".")
    raise UserError(f"--runner=beam: expected Beam's own options after --. Received: {reason}.")


@contextlib.contextmanager
def _quiet(options: Sequence[str]) -> Iterator[None]:
    """Keeps what Beam logs here off the screen, unless its options ask for a level of its log.

    A failure is one line of ours, without Beam's traceback above it. Workers that are processes of
    their own still print one.
    """
    if any(option.startswith(_LOG_LEVEL) for option in options):
        yield
        return
    loggers = [logging.getLogger(), logging.getLogger("apache_beam")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _refusing_failures() -> Iterator[None]:
    """Turns the failure of a pipeline, after all attempts, into one line."""
    try:
        yield
    except RuntimeError as error:  # whatever a worker raised, with its traceback as text
        raise UserError(
            f"--runner=beam: expected a pipeline that ends well. Received: {_reason(str(error))}. "
            "Shards that are written stay; the same command goes on from here."
        ) from None


def _reason(text: str) -> str:
    """The exception at the end of a traceback."""
    lines = [line.strip() for line in text.splitlines() if _EXCEPTION.match(line.strip())]
    line = lines[-1] if lines else " ".join(text.split())
    for wrapping in ("RuntimeError: ", "amdim_tf.errors.UserError: "):
        line = line.removeprefix(wrapping)
    return line[:500].rstrip(".")


@contextlib.contextmanager
def _interrupting() -> Iterator[None]:
    """Ends the wait for a pipeline on SIGINT (Ctrl-C) and SIGTERM."""

    def stop(number, frame):
        del frame
        raise Interrupted(
            f"Stopped by {signal.Signals(number).name}; shards that are written stay. The same "
            "command goes on from here."
        )

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _counted(metrics) -> str:
    """The counters of all workers together, and how often the model was loaded."""
    totals = dict.fromkeys(("images", "undecodable", "batches"), 0)
    found = metrics.query(beam.metrics.MetricsFilter().with_namespace(_NAMESPACE))
    for counter in found["counters"]:
        if counter.key.metric.name in totals:
            totals[counter.key.metric.name] += counter.result
    for distribution in found["distributions"]:
        if distribution.key.metric.name == "load_model_latency_milli_secs":
            totals["model loads"] = distribution.result.count
    return ", ".join(f"{name} {count}" for name, count in totals.items())


def add_steps(pipeline: beam.Pipeline, job: Job, ranges: list[tuple[int, int]]) -> None:
    """Adds the extraction of ranges of images to a pipeline."""
    request, contents = job.request, job.directory.contents
    handler = SavedModelHandler(
        request.saved_model, request.outputs, request.batch_size, contents.saved_model["sha256"]
    )
    results = (
        pipeline
        | "Ranges" >> beam.Create(ranges)
        | "ToWorkers" >> beam.Reshuffle()
        | "Read" >> beam.ParDo(_Read(request, contents.names_sha256))
        | "Features" >> RunInference(KeyedModelHandler(handler))
        | "Split"
        >> beam.ParDo(_SplitByResult(request.shard_size)).with_outputs("undecodable", main="rows")
    )
    # A shard whose images are all bad is there too, without rows.
    _ = (
        {"rows": results.rows, "undecodable": results.undecodable}
        | "ByShard" >> beam.CoGroupByKey()
        | "Write" >> beam.ParDo(_WriteShard(job.directory))
    )
