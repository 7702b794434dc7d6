"""Files of features: rows of index, path, label and one array per output.

Three formats, of which each gives the same bytes for the same rows:
    npz       NumPy arrays by column; np.load reads them without pickle.
    tfrecord  a tf.train.Example per row: index and label as int64, path as bytes, and each output
              as a list of floats, row by row.
    parquet   index int64, label int32, path as text, and each output as a list of fixed length.
A file is written aside and renamed, so that one with its own name is whole. A file beside it says
how many rows it has, while others are being written: where records end early, none tells so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import zipfile
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import tensorflow as tf

from amdim_tf import safe_files
from amdim_tf.errors import UserError

PARTIAL, ROWS = ".partial", ".rows"
_RECORDS_AT_ONCE = 256
_NO_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that zip knows


@dataclasses.dataclass(frozen=True)
class Rows:
    """Features of some images, in order.

    Attributes:
        index: int64 [n], place in the data set.
        path: n names; bytes that are no text are in them as os.fsdecode leaves them.
        label: int32 [n]; −1 for none.
        outputs: name -> float32 [n, …].
    """

    index: np.ndarray
    path: list[str]
    label: np.ndarray
    outputs: dict[str, np.ndarray]

    def __len__(self) -> int:
        """How many images."""
        return len(self.path)


@contextlib.contextmanager
def _written_aside(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A name to write to; at the end it becomes `path`, or is removed if something was raised."""
    aside = path.with_name(path.name + PARTIAL)
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write(path: pathlib.Path, kind: str, rows: Rows) -> None:
    """Writes a shard of the kind npz, tfrecord or parquet.

    Raises:
        OSError: whatever the kind, with nothing left aside.
    """
    with _written_aside(path) as aside:
        try:
            _FORMATS[kind].write(aside, rows)
        except tf.errors.OpError as error:  # its message ends in the reason
            raise OSError(error.message.split("; ")[-1]) from None
        safe_files.write_whole(_rows_file(path), str(len(rows)).encode())


def _rows_file(path: pathlib.Path) -> pathlib.Path:
    """Where the number of a shard's rows is noted."""
    return path.with_name(path.name + ROWS)


def read(path: pathlib.Path, kind: str, shapes: Mapping[str, tuple[int, ...]]) -> Rows:
    """Reads a shard back.

    Args:
        path: of the shard.
        kind: its format.
        shapes: of each output that is wanted, of one image.
    """
    with _named(path):
        rows = _FORMATS[kind].read(path, shapes)
        _check_columns(rows, shapes)
        return rows


def _check_columns(rows: Rows, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises a ValueError unless the columns have the types of `Rows` and one length."""
    columns = {"index": rows.index, "label": rows.label, **rows.outputs}
    types = {"index": np.int64, "label": np.int32}
    if type(rows.path) is not list or not all(type(name) is str for name in rows.path):
        raise ValueError("paths that are no texts")
    for name, values in columns.items():
        shape = (len(rows), *shapes.get(name, ()))
        if values.dtype != types.get(name, np.float32) or values.shape != shape:
            raise ValueError(f"{name} of {values.dtype} {list(values.shape)}")


def indices(path: pathlib.Path, kind: str, within: range) -> np.ndarray:
    """The index column of a shard that is to hold some of the images `within`, int64 [n]."""
    index = read(path, kind, {}).index
    with _named(path):
        rising = np.all(np.diff(index) > 0)
        if len(index) and not (rising and within.start <= index[0] and index[-1] < within.stop):
            raise ValueError(f"other images than some of {within.start} to {within.stop - 1}")
        with contextlib.suppress(FileNotFoundError):  # begun where nothing was noted
            noted = int(_rows_file(path).read_text())
            if noted != len(index):
                raise ValueError(f"{len(index)} of the {noted} rows that were written")
    return index


@contextlib.contextmanager
def _named(path: pathlib.Path) -> Iterator[None]:
    """Turns what a damaged file raises into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # parsers fail in more ways than can be listed
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{path}: expected a shard of features. Received: {reason}. Remove it, and run the "
            "same command again."
        ) from None


def _write_npz(path: pathlib.Path, rows: Rows) -> None:
    columns = {"index": rows.index, "path": np.array(rows.path, np.str_), "label": rows.label}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, values in {**columns, **rows.outputs}.items():
            entry = zipfile.ZipInfo(f"{name}.npy", _NO_DATE)
            with archive.open(entry, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(values), allow_pickle=False)


def _read_npz(path: pathlib.Path, shapes) -> Rows:
    with np.load(path, allow_pickle=False) as arrays:
        outputs = {name: arrays[name] for name in shapes}
        return Rows(arrays["index"], arrays["path"].tolist(), arrays["label"], outputs)


def _write_tfrecord(path: pathlib.Path, rows: Rows) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row, name_of_image in enumerate(rows.path):
            example = tf.train.Example()
            feature = example.features.feature
            feature["index"].int64_list.value.append(int(rows.index[row]))
            feature["label"].int64_list.value.append(int(rows.label[row]))
            feature["path"].bytes_list.value.append(os.fsencode(name_of_image))
            for name, values in rows.outputs.items():
                feature[name].float_list.value.extend(values[row].ravel().tolist())
            writer.write(example.SerializeToString(deterministic=True))


def _read_tfrecord(path: pathlib.Path, shapes) -> Rows:
    features = {
        "index": tf.io.FixedLenFeature([], tf.int64),
        "label": tf.io.FixedLenFeature([], tf.int64),
        "path": tf.io.FixedLenFeature([], tf.string),
        **{name: tf.io.FixedLenFeature(shape, tf.float32) for name, shape in shapes.items()},
    }
    parts = [tf.io.parse_example(tf.constant([], tf.string), features)]
    for examples in tf.data.TFRecordDataset(str(path)).batch(_RECORDS_AT_ONCE):
        parts.append(tf.io.parse_example(examples, features))
    columns = {name: np.concatenate([part[name] for part in parts]) for name in features}
    paths = [os.fsdecode(name) for name in columns["path"]]
    outputs = {name: columns[name] for name in shapes}
    return Rows(columns["index"], paths, columns["label"].astype(np.int32), outputs)


def _write_parquet(path: pathlib.Path, rows: Rows) -> None:
    arrow, parquet = _arrow()
    columns = {
        "index": arrow.array(rows.index, arrow.int64()),
        # Parquet's texts are UTF-8; the rare byte that is not is written out as \udcNN.
        "path": arrow.array(
            [name.encode("utf-8", "backslashreplace").decode() for name in rows.path],
            arrow.string(),
        ),
        "label": arrow.array(rows.label, arrow.int32()),
    }
    for name, values in rows.outputs.items():
        length = int(np.prod(values.shape[1:]))
        numbers = arrow.array(values.reshape(-1), arrow.float32())
        columns[name] = arrow.FixedSizeListArray.from_arrays(numbers, length)
    parquet.write_table(arrow.table(columns), path, write_page_checksum=True)


def _read_parquet(path: pathlib.Path, shapes) -> Rows:
    _, parquet = _arrow()
    columns = ["index", "path", "label", *shapes]
    table = parquet.read_table(path, columns=columns, page_checksum_verification=True)
    outputs = {}
    for name, shape in shapes.items():
        numbers = table[name].combine_chunks().flatten().to_numpy()
        outputs[name] = numbers.reshape(len(table), *shape)
    index, label = (table[name].to_numpy() for name in ("index", "label"))
    return Rows(index, table["path"].to_pylist(), label, outputs)


def _arrow():
    """The package pyarrow and its parquet module, which only this format needs."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            "--format=parquet: expected pyarrow; it is not installed. "
            "Run: pip install -r requirements-parquet.txt"
        ) from None
    return pyarrow, pyarrow.parquet


@dataclasses.dataclass(frozen=True)
class _Format:
    write: Callable
    read: Callable


_FORMATS = {
    "npz": _Format(_write_npz, _read_npz),
    "tfrecord": _Format(_write_tfrecord, _read_tfrecord),
    "parquet": _Format(_write_parquet, _read_parquet),
}
KINDS = tuple(_FORMATS)


def check_available(kind: str) -> None:
    """Raises a UserError unless shards of this kind can be written here."""
    if kind not in KINDS:
        raise UserError(f"--format: expected one of {', '.join(KINDS)}. Received: {kind!r}.")
    if kind == "parquet":
        _arrow()
