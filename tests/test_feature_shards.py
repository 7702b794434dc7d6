"""Shards of features: what is written is read, the same bytes every time, and nothing in part."""

import importlib.util
import resource
import time
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from amdim_tf import feature_shards
from amdim_tf.errors import UserError
from amdim_tf.feature_shards import Rows

SHAPES = {"f1": (6,), "phi7": (7, 7, 2)}
needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="needs requirements-parquet.txt"
)
KINDS = ["npz", "tfrecord", pytest.param("parquet", marks=needs_pyarrow)]


def make_rows(count=5, paths=None):
    rng = np.random.default_rng(0)
    return Rows(
        np.arange(10, 10 + count, dtype=np.int64),
        paths or [f"photos/ünï {number}.jpg" for number in range(count)],
        np.array([3, -1, 0, 7, 2], np.int32)[:count],
        {
            name: rng.standard_normal((count, *shape)).astype(np.float32)
            for name, shape in SHAPES.items()
        },
    )


def assert_equal(actual, expected):
    assert actual.path == expected.path
    for name in ("index", "label"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
        assert getattr(actual, name).dtype == getattr(expected, name).dtype
    for name, values in expected.outputs.items():
        assert actual.outputs[name].dtype == np.float32
        np.testing.assert_array_equal(actual.outputs[name], values)


@pytest.mark.parametrize("count", [5, 1, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind, count, tmp_path):
    path, rows = tmp_path / f"shard.{kind}", make_rows(count)
    feature_shards.write(path, kind, rows)
    assert_equal(feature_shards.read(path, kind, SHAPES), rows)
    np.testing.assert_array_equal(feature_shards.indices(path, kind, range(10, 20)), rows.index)
    assert {file.name for file in tmp_path.iterdir()} == {path.name, f"{path.name}.rows"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_give_the_same_bytes(kind, tmp_path, monkeypatch):
    written = []
    for now in (0, 2_000_000_000):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        monkeypatch.setattr(time, "localtime", lambda *_, now=now: time.gmtime(now))
        path = tmp_path / f"{now}.{kind}"
        feature_shards.write(path, kind, make_rows())
        written.append(path.read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize("kind", ["npz", "tfrecord"])
def test_names_that_are_no_text_stay_what_they_are(kind, tmp_path):
    path, rows = tmp_path / f"shard.{kind}", make_rows(1, ["photo \udcff.jpg"])
    feature_shards.write(path, kind, rows)
    assert feature_shards.read(path, kind, {}).path == rows.path


@needs_pyarrow
def test_parquet_writes_them_out(tmp_path):
    path = tmp_path / "shard.parquet"
    feature_shards.write(path, "parquet", make_rows(1, ["photo \udcff.jpg"]))
    assert feature_shards.read(path, "parquet", {}).path == ["photo \\udcff.jpg"]


def test_anybody_can_read_npz(tmp_path):
    path, rows = tmp_path / "shard.npz", make_rows()
    feature_shards.write(path, "npz", rows)
    with np.load(path, allow_pickle=False) as arrays:
        assert list(arrays) == ["index", "path", "label", "f1", "phi7"]
        assert arrays["phi7"].shape == (5, 7, 7, 2)
    with zipfile.ZipFile(path) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_anybody_can_read_tfrecord(tmp_path):
    path, rows = tmp_path / "shard.tfrecord", make_rows()
    feature_shards.write(path, "tfrecord", rows)
    spec = {
        "index": tf.io.FixedLenFeature([], tf.int64),
        "path": tf.io.FixedLenFeature([], tf.string),
        "phi7": tf.io.FixedLenFeature([7, 7, 2], tf.float32),
    }
    for row, record in enumerate(tf.data.TFRecordDataset(str(path))):
        example = tf.io.parse_single_example(record, spec)
        assert int(example["index"]) == rows.index[row]
        assert example["path"].numpy().decode() == rows.path[row]
        np.testing.assert_array_equal(example["phi7"], rows.outputs["phi7"][row])


@needs_pyarrow
def test_anybody_can_read_parquet(tmp_path):
    import pyarrow.parquet

    path, rows = tmp_path / "shard.parquet", make_rows()
    feature_shards.write(path, "parquet", rows)
    table = pyarrow.parquet.read_table(path)
    assert table.schema.field("f1").type == pyarrow.list_(pyarrow.float32(), 6)
    assert table["label"].to_pylist() == rows.label.tolist()
    np.testing.assert_array_equal(table["f1"].to_pylist(), rows.outputs["f1"])


def test_nothing_in_part_stays(tmp_path):
    broken = make_rows()
    broken.outputs["f1"] = np.array([object()] * 5)
    with pytest.raises(ValueError, match=r"[Oo]bject"):
        feature_shards.write(tmp_path / "shard.npz", "npz", broken)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_an_error_of_the_system(kind, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            feature_shards.write(tmp_path / "shard", kind, make_rows())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_shard_is_named(kind, tmp_path):
    path = tmp_path / f"shard.{kind}"
    feature_shards.write(path, kind, make_rows())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=rf"shard\.{kind}: expected .*Remove it") as error:
        feature_shards.read(path, kind, SHAPES)
    assert "\n" not in str(error.value)


@needs_pyarrow
def test_flipped_bits_of_parquet_are_refused(tmp_path):
    path = tmp_path / "shard.parquet"
    feature_shards.write(path, "parquet", make_rows())
    whole = path.read_bytes()
    values = make_rows().outputs["f1"].tobytes()
    start = whole.index(values)  # the numbers lie as they are in their page
    for place in (start, start + len(values) // 2, start + len(values) - 1):
        for bit in (0, 7):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            with pytest.raises(UserError, match=r"shard\.parquet: expected .*Remove it") as error:
                feature_shards.read(path, "parquet", SHAPES)
            assert "\n" not in str(error.value)


def _odd_index(path, index):
    np.savez(path, index=index, path=np.array(["a", "b"]), label=np.zeros(2, np.int32))


def _encrypted(path):
    _odd_index(path, np.array([10, 11]))
    contents = bytearray(path.read_bytes())
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = contents.find(signature)
        while start >= 0:
            contents[start + place] |= 1
            start = contents.find(signature, start + 4)
    path.write_bytes(contents)


def _enormous(path):
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (10000000000000,), }\n"
    with zipfile.ZipFile(path, "w") as archive:
        magic = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
        archive.writestr("index.npy", magic + header)


_DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "array": lambda path: np.save(path.open("wb"), np.zeros(3)),
    "scalar": lambda path: _odd_index(path, np.int64(10)),
    "floats": lambda path: _odd_index(path, np.array([10.0, 11.0])),
    "short": lambda path: _odd_index(path, np.array([10])),
    "falling": lambda path: _odd_index(path, np.array([11, 10])),
    "twice": lambda path: _odd_index(path, np.array([10, 10])),
    "before": lambda path: _odd_index(path, np.array([9, 10])),
    "after": lambda path: _odd_index(path, np.array([10, 15])),
    "encrypted": _encrypted,
    "enormous": _enormous,
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_other_damage_is_one_line(damage, tmp_path):
    path = tmp_path / "shard.npz"
    _DAMAGES[damage](path)
    with pytest.raises(UserError, match=r"shard\.npz: expected .*Remove it") as error:
        feature_shards.indices(path, "npz", range(10, 15))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kept", [0, 3])
def test_records_that_end_early_are_noticed(kept, tmp_path):
    path, short = tmp_path / "shard.tfrecord", tmp_path / "short.tfrecord"
    feature_shards.write(path, "tfrecord", make_rows())
    feature_shards.write(short, "tfrecord", make_rows(kept))
    short.replace(path)  # whole records, and nothing after them
    with pytest.raises(UserError, match=rf"{kept} of the 5 rows that were written\. Remove it"):
        feature_shards.indices(path, "tfrecord", range(10, 15))


def test_unknown_kinds_are_refused():
    with pytest.raises(UserError, match="--format: expected one of npz, tfrecord, parquet"):
        feature_shards.check_available("csv")
