"""Packed folders and TensorFlow Datasets' own shards, read by index."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from pictures import encoded, picture, write_tree

from amdim_tf import config as config_lib
from amdim_tf import input_pipeline, records, sources
from amdim_tf.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent


def _prepare(*flags, code=0):
    done = subprocess.run(
        [sys.executable, "tools/prepare_folder.py", *flags],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


def _photos(root, count=11):
    files = {f"train/c{i % 3}/{i:02d}.jpg": picture(140, 150 + i, i) for i in range(count)}
    files |= {f"test/c{i}/x.jpg": picture(140, 150, i) for i in range(3)}
    return write_tree(root, files)


def _config(root):
    return config_lib.make(
        {"dataset": "folder", "data_dir": str(root), "image_size": 32, "batch_size": 4}
    )


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    root = tmp_path_factory.mktemp("pack")
    _photos(root / "photos")
    flags = [f"--data_dir={root / 'photos'}", f"--output_dir={root / 'packed'}"]
    done = _prepare(*flags, "--shard_images=4")
    assert "Packed train, test" in done.stdout
    return root, flags


def test_packed_equals_the_folder(packed):
    root, _ = packed
    folder, shards = (
        sources.load(_config(root / name).data, "train") for name in ("photos", "packed")
    )
    assert len(folder) == len(shards) == 11
    assert folder.class_names == shards.class_names == ("c0", "c1", "c2")
    for index in range(11):
        one, other = (source.read(np.int64(index)) for source in (folder, shards))
        assert one[0].numpy() == other[0].numpy() and int(one[1]) == int(other[1])
    one, other = (
        next(iter(input_pipeline.training_batches(source, _config(root), 1, 2)))
        for source in (folder, shards)
    )
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_stopped_packing_goes_on(packed):
    root, flags = packed
    output = root / "packed"
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    shards = sorted(output.glob("train-*.tfrecord"))
    kept = shards[0].stat().st_mtime_ns
    shards[1].rename(f"{shards[1]}.partial")
    (output / f"{shards[1].name}.partial").write_bytes(b"half of it")
    (output / "train.records.json").unlink()
    _prepare(*flags, "--shard_images=4")
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    assert shards[0].stat().st_mtime_ns == kept


def test_packing_other_files_into_the_same_place_is_refused(packed):
    _, flags = packed
    done = _prepare(*flags, "--shard_images=5", code=2)
    assert done.stderr.count("\n") == 1 and "--output_dir" in done.stderr


def test_damaged_shards_and_lists(packed, tmp_path):
    root, _ = packed
    for path in (root / "packed").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = sorted(tmp_path.glob("train-*.tfrecord"))[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(UserError, match="whole TFRecord records"):
        sources.load(_config(tmp_path).data, "train")
    shard.unlink()
    with pytest.raises(UserError, match="not there"):
        sources.load(_config(tmp_path).data, "train")
    listing = tmp_path / "train.records.json"
    for text in ("", "[]", "{}", '{"files": 3, "class_names": []}'):
        listing.write_text(text)
        with pytest.raises(UserError, match="prepare_folder"):
            sources.load(_config(tmp_path).data, "train")
    # A list cannot lead out of its directory.
    listing.write_text(json.dumps({"files": ["../../etc/passwd"], "class_names": []}))
    with pytest.raises(UserError, match=str(tmp_path / "passwd")):
        sources.load(_config(tmp_path).data, "train")


def test_record_bytes(tmp_path):
    import tensorflow as tf

    path = tmp_path / "x.tfrecord"
    contents = [b"", b"one", os.urandom(5000)]
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in contents:
            writer.write(record)
    index = records.scan([str(path)], ())
    assert [index.read(number) for number in (2, 0, 1)] == [contents[2], contents[0], contents[1]]


def test_mistakes(tmp_path):
    assert "--data_dir" in _prepare(f"--output_dir={tmp_path}", code=2).stderr
    done = _prepare(f"--data_dir={tmp_path / 'no'}", f"--output_dir={tmp_path}", code=2)
    assert done.stderr.count("\n") == 1 and str(tmp_path / "no") in done.stderr
    write_tree(tmp_path / "in", {"a.png": encoded(picture(), "PNG")})
    (tmp_path / "file").write_text("")
    done = _prepare(f"--data_dir={tmp_path / 'in'}", f"--output_dir={tmp_path / 'file'}", code=2)
    assert done.stderr.count("\n") == 1 and "--output_dir" in done.stderr
