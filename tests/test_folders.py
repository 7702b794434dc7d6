"""Folders of images: layouts, names, links, labels, broken files among good ones."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from pictures import encoded, picture, write_tree

from amdim_tf import config as config_lib
from amdim_tf import input_pipeline, sources
from amdim_tf.errors import UserError
from amdim_tf.examples import ArraySource, EncodedSource, subset
from amdim_tf.folders import image_files


def _config(root, **settings):
    return config_lib.make(
        {"dataset": "folder", "data_dir": str(root), "image_size": 32, "batch_size": 4, **settings}
    )


def _load(root, split="train", **settings):
    return sources.load(_config(root, **settings).data, split)


def _photo(seed=0, side=150):
    return picture(side, side + seed, seed)


def _class_tree(root, **more):
    return write_tree(
        root,
        {
            "train/cat/a.jpg": _photo(0),
            "train/cat/deeper/b.JPEG": _photo(1),
            "train/dog/c.PNG": encoded(_photo(2), "PNG"),
            "train/dog/d.bmp": encoded(_photo(3), "BMP"),
            "train/Ünïcödé 犬/e.webp": encoded(_photo(4), "WEBP"),
            "train/dog/notes.txt": b"not an image",
            "test/cat/f.jpg": _photo(5),
            "test/dog/g.jpg": _photo(6),
            "test/Ünïcödé 犬/h.jpg": _photo(7),
            **more,
        },
    )


def test_classes_and_splits(tmp_path):
    source = _load(_class_tree(tmp_path))
    assert isinstance(source, EncodedSource)
    assert source.class_names == ("cat", "dog", "Ünïcödé 犬")
    names = [pathlib.Path(source.name_of(i)).name for i in range(len(source))]
    assert names == ["a.jpg", "b.JPEG", "c.PNG", "d.bmp", "e.webp"]
    labels = [int(source.read(np.int64(i))[1]) for i in range(len(source))]
    assert labels == [0, 0, 1, 1, 2]
    assert len(_load(tmp_path, "test")) == 3


def test_val_serves_as_test(tmp_path):
    write_tree(tmp_path, {"train/a/1.jpg": _photo(), "val/a/2.jpg": _photo(1)})
    assert len(_load(tmp_path, "test")) == 1


def test_tree_without_labels(tmp_path):
    write_tree(tmp_path, {"x/y/z/1.jpg": _photo(), "2.jpg": _photo(1), "x/3.jpg": _photo(2)})
    source = _load(tmp_path)
    assert len(source) == 3 and source.class_names == ()
    assert {int(source.read(np.int64(i))[1]) for i in range(3)} == {-1}
    with pytest.raises(UserError, match="without splits"):
        _load(tmp_path, "test")


def test_images_without_class_folders_have_no_labels(tmp_path, capsys):
    source = _load(write_tree(tmp_path, {"train/1.jpg": _photo(), "train/2.jpg": _photo(1)}))
    assert len(source) == 2 and source.class_names == ()
    assert capsys.readouterr().err == ""


def test_a_stray_image_does_not_take_the_labels_of_the_others(tmp_path, capsys):
    source = _load(_class_tree(tmp_path, **{"train/stray.jpg": _photo(8)}))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"warning: {tmp_path / 'train/stray.jpg'}: ")
    assert "Left out: 1 of 6 images" in lines[0]
    assert [int(source.read(np.int64(i))[1]) for i in range(len(source))] == [0, 0, 1, 1, 2]
    assert [pathlib.Path(source.name_of(i)).name for i in (0, 4)] == ["a.jpg", "e.webp"]


def test_splits_that_there_are(tmp_path):
    whole = _config(_class_tree(tmp_path / "whole"))
    part = _config(write_tree(tmp_path / "part", {"train/a/1.jpg": _photo()}))
    assert sources.splits_of(whole.data) == ("labelled", "train", "test")
    assert sources.splits_of(part.data) == ("labelled", "train")
    (tmp_path / "part" / "test.records.json").write_text("{}")
    assert "test" in sources.splits_of(part.data)
    assert "test" in sources.splits_of(config_lib.make({"dataset": "scenes"}).data)


def test_bad_images_of_a_part_are_counted_against_the_part(tmp_path):
    files = {f"{number:03d}.jpg": b"no picture" for number in range(3)}
    files |= {f"{number:03d}.jpg": _photo(number % 5) for number in range(3, 63)}
    source = _load(write_tree(tmp_path, files))
    part = subset(source, np.array([62, 1, 30, 31]))
    batches = input_pipeline.evaluation_batches(part, _config(tmp_path), 4)
    assert [len(labels) for _, labels in batches] == [3]
    assert [pathlib.Path(name).name for name in part.skipped.names] == ["001.jpg"]
    with pytest.raises(UserError, match="at most 5% of 4 images"):
        part.skipped.check()


def test_pipes_devices_and_endless_files_are_bad_images(tmp_path):
    """None of them is waited for, or read into memory."""
    files = {f"{number:03d}.jpg": _photo(number % 5) for number in range(8)}
    write_tree(tmp_path, files)
    os.mkfifo(tmp_path / "pipe.jpg")
    os.symlink("/dev/zero", tmp_path / "zero.jpg")
    with open(tmp_path / "sparse.jpg", "wb") as file:
        file.truncate(2**40)
    source = _load(tmp_path)
    batches = input_pipeline.evaluation_batches(source, _config(tmp_path), 16)
    assert [len(labels) for _, labels in batches] == [8]
    names = sorted(pathlib.Path(name).name for name in source.skipped.names)
    assert names == ["pipe.jpg", "sparse.jpg", "zero.jpg"]


def test_small_images_are_kept_in_memory(tmp_path):
    files = {f"train/c{i % 2}/{i}.png": encoded(picture(20, 24, i), "PNG") for i in range(6)}
    source = _load(write_tree(tmp_path, files))
    assert isinstance(source, ArraySource)
    assert source.images.shape == (6, 20, 24, 3)
    assert list(source.labels) == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(source.images[1], np.asarray(picture(20, 24, 2)))


def test_small_images_of_several_sizes_stay_on_disk(tmp_path):
    files = {f"{i}.png": encoded(picture(20, 20 + i, i), "PNG") for i in range(6)}
    assert isinstance(_load(write_tree(tmp_path, files)), EncodedSource)


def test_link_loops_and_links(tmp_path):
    _class_tree(tmp_path / "data")
    os.symlink(tmp_path / "data" / "train", tmp_path / "data" / "train" / "cat" / "loop")
    os.symlink(tmp_path / "data" / "test" / "cat" / "f.jpg", tmp_path / "data/train/cat/link.jpg")
    found, unreadable = image_files(tmp_path / "data" / "train")
    assert sorted(os.path.basename(path) for path in found) == sorted(
        [b"a.jpg", b"b.JPEG", b"c.PNG", b"d.bmp", b"e.webp", b"link.jpg"]
    )
    assert unreadable == []


def test_unreadable_directory_is_noted(tmp_path):
    write_tree(tmp_path, {"open/1.jpg": _photo(), "closed/2.jpg": _photo(1)})
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == pathlib.Path.home().owner() and len(folder.parts) > 2:
            folder.chmod(0o755)
    (tmp_path / "closed").chmod(0)
    code = (
        "import os, pathlib, sys; from amdim_tf.folders import image_files;"
        "os.getuid() or os.setuid(65534); print(image_files(pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    (tmp_path / "closed").chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert "open/1.jpg" in done.stdout and "2.jpg" not in done.stdout
    assert f"['{tmp_path / 'closed'}']" in done.stdout


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda root: root / "none", "expected a directory"),
        (lambda root: root, "Received: none"),
    ],
)
def test_no_images(tmp_path, make, named):
    with pytest.raises(UserError, match=named):
        _load(make(tmp_path))


def _broken_tree(root, good=40):
    files = {f"train/a/{i:03d}.jpg": _photo(i % 7) for i in range(good)}
    whole = encoded(_photo())
    files |= {
        "train/a/000_empty.jpg": b"",
        "train/a/010_text.jpg": b"hello",
        "train/b/truncated.jpg": whole[: len(whole) // 2],
        "train/b/png_named.JPEG": encoded(_photo(), "PNG"),
        "train/b/grey.jpg": encoded(_photo().convert("L")),
        "train/b/cmyk.jpg": encoded(_photo().convert("CMYK")),
        "train/b/dot.jpg": picture(1, 1),
        "train/b/line.png": encoded(picture(1, 5000), "PNG"),
    }
    return write_tree(root, files)


def test_bad_images_are_replaced_and_noted(tmp_path):
    _broken_tree(tmp_path)
    config = _config(tmp_path, batch_size=8, max_bad_images=0.1)
    source = sources.load(config.data, "train")
    batches = list(input_pipeline.training_batches(source, config, 0, 6).as_numpy_iterator())
    assert len(batches) == 6
    assert all(np.isfinite(batch["view1"]).all() for batch in batches)
    bad = {pathlib.Path(name).name for name in source.skipped.names}
    assert bad == {"000_empty.jpg", "010_text.jpg", "truncated.jpg"}
    source.skipped.check()
    # The same batches again: a replacement is a function of the data, too.
    again = list(input_pipeline.training_batches(source, config, 0, 6).as_numpy_iterator())
    for one, other in zip(batches, again, strict=True):
        np.testing.assert_array_equal(one["view2"], other["view2"])


def test_too_many_bad_images(tmp_path):
    _broken_tree(tmp_path)
    source = _load(tmp_path, max_bad_images=0.05)
    config = _config(tmp_path, batch_size=8)
    list(input_pipeline.training_batches(source, config, 0, 6))
    with pytest.raises(UserError, match="--max_bad_images: expected at most 5% of 48 images"):
        source.skipped.check()


def test_evaluation_leaves_bad_images_out(tmp_path):
    _broken_tree(tmp_path)
    config = _config(tmp_path)
    source = sources.load(config.data, "train")
    batches = list(input_pipeline.evaluation_batches(source, config, 16).as_numpy_iterator())
    assert [len(labels) for _, labels in batches] == [16, 16, 13]
    assert len(source.skipped.names) == 3


def test_views_do_not_depend_on_parallelism(tmp_path):
    _class_tree(tmp_path)
    config = _config(tmp_path, batch_size=4)
    source = sources.load(config.data, "train")
    whole = input_pipeline.training_batches(source, config, 0, 3)
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    for one, other in zip(whole, whole.with_options(options), strict=True):
        np.testing.assert_array_equal(one["view1"], other["view1"])


def test_shards_make_up_the_batch(tmp_path):
    _class_tree(tmp_path)
    config = _config(tmp_path, batch_size=4)
    source = sources.load(config.data, "train")
    whole = next(iter(input_pipeline.training_batches(source, config, 2, 3)))
    parts = [
        next(iter(input_pipeline.training_batches(source, config, 2, 3, shard, 2)))
        for shard in (0, 1)
    ]
    for name, value in whole.items():
        joined = np.concatenate([part[name] for part in parts])
        np.testing.assert_allclose(joined, value, atol=1e-4)


def test_on_disk_equals_in_memory(tmp_path, monkeypatch):
    files = {f"train/c/{i}.png": encoded(picture(48, 48, i), "PNG") for i in range(8)}
    write_tree(tmp_path, files)
    config = _config(tmp_path, batch_size=8)
    in_memory = sources.load(config.data, "train")
    monkeypatch.setattr("amdim_tf.examples._LARGEST_SIDE", 1)
    on_disk = sources.load(config.data, "train")
    assert isinstance(in_memory, ArraySource) and isinstance(on_disk, EncodedSource)
    for augmentation in ("basic", "none"):
        config = _config(tmp_path, batch_size=8, augmentation=augmentation)
        one, other = (
            next(iter(input_pipeline.training_batches(source, config, 0, 1)))
            for source in (in_memory, on_disk)
        )
        for name in one:
            difference = np.abs(one[name] - other[name])
            # Crops are resampled in bands, which makes a difference of a grey level here and there.
            assert difference.mean() < 0.01 and np.mean(difference < 0.05) > 0.99
