"""Packed folders and TensorFlow Datasets' own shards, read by index."""

import json
import os
import pathlib
import resource
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
from pictures import encoded, picture, write_tree

from amdim_tf import config as config_lib
from amdim_tf import input_pipeline, records, sources
from amdim_tf.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))
import prepare_folder  # noqa: E402


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
    """A directory with photos/ and, of the same, packed/."""
    root = tmp_path_factory.mktemp("pack")
    _photos(root / "photos")
    flags = [f"--data_dir={root / 'photos'}", f"--output_dir={root / 'packed'}"]
    done = _prepare(*flags, "--shard_images=4")
    assert "Packed train, test" in done.stdout
    return root


def test_packed_equals_the_folder(packed):
    root = packed
    folder, shards = (
        sources.load(_config(root / name).data, "train") for name in ("photos", "packed")
    )
    assert len(folder) == len(shards) == 11
    assert folder.class_names == shards.class_names == ("c0", "c1", "c2")
    for index in range(11):
        one, other = (source.read(np.int64(index)) for source in (folder, shards))
        assert one[0].numpy() == other[0].numpy() and int(one[1]) == int(other[1])
        place = os.path.relpath(folder.name_of(index), root / "photos")
        assert shards.name_of(index) == str(root / "packed" / place)
    one, other = (
        next(iter(input_pipeline.training_batches(source, _config(root), 1, 2)))
        for source in (folder, shards)
    )
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def test_stopped_packing_goes_on(packed):
    root, output = packed, packed / "packed"
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    shards = sorted(output.glob("train-*.tfrecord"))
    kept = shards[0].stat().st_mtime_ns
    shards[1].rename(f"{shards[1]}.partial")
    (output / f"{shards[1].name}.partial").write_bytes(b"half of it")
    (output / "train.records.json").unlink()
    prepare_folder.pack(root / "photos", output, 4)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    assert shards[0].stat().st_mtime_ns == kept


def test_packing_other_files_into_the_same_place_is_refused(packed):
    with pytest.raises(UserError, match="--output_dir: expected an empty directory"):
        prepare_folder.pack(packed / "photos", packed / "packed", 5)


def test_a_full_disk_is_one_line_and_leaves_no_half_shard(tmp_path):
    write_tree(tmp_path / "in", {"a.png": encoded(picture(), "PNG")})
    partial = tmp_path / "out" / "train-00000-of-00001.tfrecord.partial"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(UserError, match=r"--output_dir: .*File too large") as error:
            prepare_folder.pack(tmp_path / "in", tmp_path / "out", 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(error.value)
    assert [path.name for path in partial.parent.iterdir()] == ["train.listing"]
    prepare_folder.pack(tmp_path / "in", tmp_path / "out", 1000)
    assert len(records.read_index(tmp_path / "out", "train")) == 1


def test_damaged_shards_and_lists(packed, tmp_path):
    for path in (packed / "packed").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = sorted(tmp_path.glob("train-*.tfrecord"))[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(UserError, match="whole TFRecord records"):
        sources.load(_config(tmp_path).data, "train")
    shard.unlink()
    with pytest.raises(UserError, match="no such file"):
        sources.load(_config(tmp_path).data, "train")
    listing = tmp_path / "train.records.json"
    for text in ("", "[]", "{}", '{"files": 3, "class_names": []}'):
        listing.write_text(text)
        with pytest.raises(UserError, match="prepare_folder"):
            sources.load(_config(tmp_path).data, "train")
    other = "test-00000-of-00001.tfrecord"
    listing.write_text(json.dumps({"files": [other], "class_names": [], "names": ["a.jpg"]}))
    with pytest.raises(UserError, match="name for each of the 3 images"):
        sources.load(_config(tmp_path).data, "train")
    # A list cannot lead out of its directory.
    listing.write_text(json.dumps({"files": ["../../etc/passwd"], "class_names": []}))
    with pytest.raises(UserError, match=str(tmp_path / "passwd")):
        sources.load(_config(tmp_path).data, "train")


@pytest.mark.parametrize(
    "text", ["[" * 100000, "7", "[]", '{"files": [], "class_names": []}', '{"files": 3}']
)
def test_lists_that_are_none(text, tmp_path):
    (tmp_path / "train.records.json").write_text(text)
    with pytest.raises(UserError, match="expected the list that"):
        records.read_index(tmp_path, "train")


def test_a_label_without_a_class_is_a_bad_record(packed, tmp_path):
    shutil.copytree(packed / "packed", tmp_path / "cut")
    path = tmp_path / "cut" / "train.records.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "class_names": ["c0", "c1"]}))
    source = sources.load(_config(tmp_path / "cut").data, "train")
    list(input_pipeline.evaluation_batches(source, _config(tmp_path / "cut"), 16))
    assert len(source.skipped.names) == 3  # those of c2
    assert all("/c2/" in name for name in source.skipped.names)


def test_a_link_in_the_way_of_a_shard_is_not_followed(packed, tmp_path):
    output, victim = tmp_path / "out", tmp_path / "victim"
    output.mkdir()
    victim.write_text("precious")
    (output / "train-00000-of-00003.tfrecord.partial").symlink_to(victim)
    prepare_folder.pack(packed / "photos", output, 4)
    assert victim.read_text() == "precious"
    assert (output / "train-00000-of-00003.tfrecord").is_file()
    (output / "train.listing").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="--output_dir: expected an empty directory"):
        prepare_folder.pack(packed / "photos", output, 4)


def test_record_bytes(tmp_path):
    import tensorflow as tf

    path = tmp_path / "x.tfrecord"
    contents = [b"", b"one", os.urandom(5000)]
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in contents:
            writer.write(record)
    index = records.scan([str(path)], ())
    assert [index.read(number) for number in (2, 0, 1)] == [contents[2], contents[0], contents[1]]
    assert index.name_of(1) == f"{path}, byte {12 + 4 + 12}"


def test_more_shards_than_files_may_be_open(tmp_path):
    """ImageNet has 1024 shards, and a process usually may have 1024 files open."""
    most = 10 + max(int(name) for name in os.listdir("/proc/self/fd"))
    paths = [tmp_path / f"{number:04d}" for number in range(most)]
    for path in paths:
        path.write_bytes(struct.pack("<QI", 4, 0) + path.name.encode() + b"sums")
    index = records.scan(list(map(str, paths)), ())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        contents = [index.read(number) for number in range(most)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert contents == [path.name.encode() for path in paths]


def test_mistakes(tmp_path):
    done = _prepare(f"--output_dir={tmp_path}", code=2)
    assert done.stderr.count("\n") == 1 and "--data_dir" in done.stderr
    with pytest.raises(UserError, match=str(tmp_path / "no")):
        prepare_folder.pack(tmp_path / "no", tmp_path, 1000)
    write_tree(tmp_path / "in", {"a.png": encoded(picture(), "PNG")})
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output_dir"):
        prepare_folder.pack(tmp_path / "in", tmp_path / "file", 1000)
