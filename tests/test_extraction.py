"""Feature extraction as a user runs it: order, bad images, resuming, refusals, real processes."""

import functools
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from exports import all_bytes, read_npz, small_files, write_export
from pictures import encoded, picture, write_tree
from test_train import ROOT, refused, run

import amdim_tf
from amdim_tf import directory_locks, extraction, feature_directory, feature_shards, scenes
from amdim_tf.errors import UserError
from amdim_tf.examples import ArraySource
from amdim_tf.extraction import Request
from amdim_tf.feature_model import FeatureModel

sys.path.append(str(ROOT / "tools"))
import prepare_folder

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return write_export(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    """Each export is loaded once for all tests of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extraction, "FeatureModel", functools.cache(FeatureModel))
        yield


@pytest.fixture(scope="module")
def finished(export, folder, tmp_path_factory):
    """Features of `folder`; tests work on copies."""
    output = tmp_path_factory.mktemp("finished") / "f"
    extraction.extract(make_request(export, folder, output))
    return output


@pytest.fixture(scope="module")
def model(export):
    return amdim_tf.load_model(export.parent)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """40 small test images of one size."""
    return write_tree(tmp_path_factory.mktemp("small"), small_files())


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Images of different sizes and formats without splits, of which four are bad."""
    good = encoded(picture())
    files = {
        "a/0.jpg": picture(60, 80, seed=0),
        "a/1.png": encoded(picture(33, 47, seed=1), "PNG"),
        "a/2.jpg": good[: len(good) // 2],
        "a/3.jpg": picture(60, 80, seed=3),
        "a/4.webp": encoded(picture(50, 51, seed=4), "WEBP"),
        "b/5.jpg": b"no image",
        "b/6.bmp": encoded(picture(60, 80, seed=6), "BMP"),
        "b/7.jpg": b"",
        "b/8.jpg": encoded(picture(20, 30, seed=8), "GIF"),
    }
    root = write_tree(tmp_path_factory.mktemp("photos"), files)
    (root / "c").mkdir()
    (root / "c" / "9.jpg").symlink_to("nowhere")
    return root


BAD = ["a/2.jpg", "b/5.jpg", "b/7.jpg", "c/9.jpg"]
GOOD = ["a/0.jpg", "a/1.png", "a/3.jpg", "a/4.webp", "b/6.bmp", "b/8.jpg"]


def make_request(export, data_dir, output, **settings):
    defaults = {"dataset": "folder", "split": "test", "batch_size": 4, "shard_size": 12}
    return Request(str(export), data_dir=str(data_dir), output=str(output), **defaults | settings)


def expected(model, paths):
    """What the model itself gives, image by image."""
    outputs = [
        model.encode(model.preprocess(_pixels(path)[np.newaxis])) for path in map(str, paths)
    ]
    return {name: np.concatenate([output[name] for output in outputs]) for name in outputs[0]}


def _pixels(path):
    from amdim_tf import decode

    with open(path, "rb") as file:
        return decode.decode(tf.constant(file.read())).numpy()


def test_every_image_in_order(export, model, folder, tmp_path, capsys):
    manifest = extraction.extract(make_request(export, folder, tmp_path / "f"))
    columns = read_npz(tmp_path / "f")
    paths = sorted(str(path) for path in (folder / "test").rglob("*.jpg"))
    assert columns["path"].tolist() == paths
    assert columns["index"].tolist() == list(range(40))
    assert columns["label"].tolist() == [0] * 20 + [1] * 20
    assert list(columns) == ["index", "path", "label", "f1"]
    difference = np.abs(columns["f1"] - expected(model, paths)["f1"]).max()
    assert difference < TOLERANCE
    assert (manifest["rows"], manifest["skipped"], manifest["classes"]) == (40, 0, ["cat", "dog"])
    assert [shard["rows"] for shard in manifest["shards"]] == [12, 12, 12, 4]
    assert manifest["saved_model"]["step"] == 3
    assert json.loads((tmp_path / "f" / "manifest.json").read_text()) == manifest
    assert "f1 of 40 images in 4 shards" in capsys.readouterr().out
    names = [f"features-{shard:05d}-of-00004.npz" for shard in range(4)]
    assert sorted(all_bytes(tmp_path / "f")) == [*names, "manifest.json"]


@pytest.mark.parametrize("outputs", [("f1",), ("phi7", "f1")])
def test_bad_images_are_skipped_and_listed(outputs, export, model, photos, tmp_path, capsys):
    request = make_request(export, photos, tmp_path / "f", split="train", outputs=outputs)
    manifest = extraction.extract(request)
    columns = read_npz(tmp_path / "f")
    assert columns["path"].tolist() == [str(photos / name) for name in GOOD]
    assert columns["index"].tolist() == [0, 1, 3, 4, 6, 8]
    assert columns["label"].tolist() == [-1] * 6
    for name, values in expected(model, columns["path"]).items():
        if name in outputs:
            assert np.abs(columns[name] - values).max() < TOLERANCE
    assert set(columns) == {"index", "path", "label", *outputs}
    assert (manifest["rows"], manifest["skipped"]) == (6, 4)
    listed = (tmp_path / "f" / "skipped_images.txt").read_text().splitlines()
    assert listed == [str(photos / name) for name in BAD]
    shown = capsys.readouterr().out
    assert "4 images could not be decoded" in shown and "remove --output first" in shown


def test_sizes_are_grouped_where_a_batch_is_large(export, model, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("amdim_tf.feature_model._PIXELS_AT_ONCE", 60 * 80)
    files = [(photos / name).read_bytes() for name in GOOD]
    for outputs in (["f1"], ["f1", "f5"]):
        features, good = FeatureModel(export, outputs).of_files(files)
        assert good.all()
        wanted = expected(model, [photos / name for name in GOOD])
        assert np.abs(features["f1"] - wanted["f1"]).max() < TOLERANCE


def test_scenes_are_named_by_their_place(export, model, tmp_path, monkeypatch):
    monkeypatch.setitem(scenes.SPLIT_SIZES, "test", 10)
    extraction.extract(make_request(export, "", tmp_path / "f", dataset="scenes"))
    columns = read_npz(tmp_path / "f")
    assert columns["path"][3] == "scenes/test/3"
    rendered = scenes.render("test", np.arange(10), 32)
    wanted = model.encode(model.preprocess(rendered.images))["f1"]
    assert np.abs(columns["f1"] - wanted).max() < TOLERANCE
    np.testing.assert_array_equal(columns["label"], rendered.labels)


needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="needs requirements-parquet.txt"
)


@pytest.mark.parametrize("kind", ["tfrecord", pytest.param("parquet", marks=needs_pyarrow)])
def test_other_formats_hold_the_same(kind, export, photos, tmp_path):
    for name in ("npz", kind):
        request = make_request(export, photos, tmp_path / name, split="train", format=name)
        extraction.extract(request)
    columns = read_npz(tmp_path / "npz")
    paths = sorted((tmp_path / kind).glob("features-*"))
    rows = extraction.joined([feature_shards.read(path, kind, {"f1": (32,)}) for path in paths])
    assert rows.path == columns["path"].tolist()
    np.testing.assert_array_equal(rows.index, columns["index"])
    np.testing.assert_array_equal(rows.outputs["f1"], columns["f1"])
    lists = [tmp_path / name / "skipped_images.txt" for name in ("npz", kind)]
    assert lists[0].read_bytes() == lists[1].read_bytes()


def test_it_goes_on_where_it_stopped(export, photos, tmp_path, capsys):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for output in (whole, resumed):
        extraction.extract(make_request(export, photos, output, split="train", shard_size=3))
    (resumed / "manifest.json").rename(resumed / "unfinished.json")
    document = json.loads((resumed / "unfinished.json").read_text())
    for name in ("rows", "skipped", "columns", "shards"):
        del document[name]
    (resumed / "unfinished.json").write_text(json.dumps(document))
    (resumed / "features-00001-of-00004.npz").unlink()
    (resumed / "features-00003-of-00004.npz").rename(
        resumed / "features-00003-of-00004.npz.partial"
    )
    (resumed / "skipped_images.txt").unlink()
    kept = (resumed / "features-00000-of-00004.npz").stat().st_mtime_ns
    capsys.readouterr()
    extraction.extract(make_request(export, photos, resumed, split="train", shard_size=3))
    assert "Going on after 6 of 10 images" in capsys.readouterr().out
    assert all_bytes(resumed) == all_bytes(whole)
    assert (resumed / "features-00000-of-00004.npz").stat().st_mtime_ns == kept
    extraction.extract(make_request(export, photos, resumed, split="train", shard_size=3))
    assert "already complete, f1 of 6 images" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["npz", "tfrecord", pytest.param("parquet", marks=needs_pyarrow)])
def test_damaged_shards_of_finished_features_are_written_again(
    kind, export, photos, tmp_path, capsys
):
    request = make_request(
        export, photos, tmp_path / "f", split="train", format=kind, batch_size=2, shard_size=3
    )
    extraction.extract(request)
    before = all_bytes(tmp_path / "f")
    kept, cut, gone, _ = sorted((tmp_path / "f").glob("features-*"))
    time_of_kept = kept.stat().st_mtime_ns
    cut.write_bytes(cut.read_bytes()[:-10])
    gone.unlink()
    capsys.readouterr()
    extraction.extract(request)
    shown = capsys.readouterr()
    assert shown.err.startswith(f"warning: {tmp_path / 'f'}: 2 of 4 shards are missing or of ")
    assert f"the first {cut.name};" in shown.err and shown.err.count("warning") == 1
    assert "Going on after 4 of 10 images" in shown.out
    assert all_bytes(tmp_path / "f") == before
    assert kept.stat().st_mtime_ns == time_of_kept
    extraction.extract(request)
    shown = capsys.readouterr()
    assert "already complete" in shown.out and not shown.err


def test_manifests_without_sizes_tell_missing_shards(export, folder, finished, tmp_path, capsys):
    features = shutil.copytree(finished, tmp_path / "f")
    document = json.loads((features / "manifest.json").read_text())
    for shard in document["shards"]:
        assert shard.pop("bytes") == (features / shard["name"]).stat().st_size
    (features / "manifest.json").write_text(json.dumps(document))
    request = make_request(export, folder, features)
    extraction.extract(request)
    assert "already complete" in capsys.readouterr().out
    (features / document["shards"][3]["name"]).unlink()
    extraction.extract(request)
    assert "1 of 4 shards are missing" in capsys.readouterr().err
    assert all_bytes(features) == all_bytes(finished)


def test_damaged_shards_do_not_excuse_other_settings(export, folder, finished, tmp_path):
    features = shutil.copytree(finished, tmp_path / "f")
    (features / "features-00001-of-00004.npz").unlink()
    before = all_bytes(features)
    with pytest.raises(UserError, match="holds features of something else"):
        extraction.extract(make_request(export, folder, features, batch_size=5))
    assert all_bytes(features) == before


def _start(export, folder, output):
    flags = [f"--saved_model={export}", "--dataset=folder", f"--data_dir={folder}"]
    flags += ["--split=test", f"--output={output}", "--batch_size=2", "--shard_size=4"]
    return subprocess.Popen(
        [sys.executable, "-m", "amdim_tf.extract", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


def _wait_for_shards(process, output, count):
    while process.poll() is None and len(list(output.glob("features-*.npz"))) < count:
        time.sleep(0.01)
    assert process.poll() is None


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory):
    """Enough images that a run can be stopped in the middle."""
    return write_tree(tmp_path_factory.mktemp("large"), small_files(240))


def test_killed_and_started_again_gives_the_same_bytes(export, large_folder, tmp_path):
    request = make_request(export, large_folder, tmp_path / "whole", batch_size=2, shard_size=4)
    extraction.extract(request)
    output = tmp_path / "killed"
    process = _start(export, large_folder, output)
    _wait_for_shards(process, output, random.randrange(1, 40))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (output / "manifest.json").exists()
    (output / "features-00059-of-00060.npz.partial").write_bytes(b"half a shard")
    finished = _start(export, large_folder, output)
    shown, errors = finished.communicate(timeout=120)
    assert finished.returncode == 0, errors
    assert "Going on after" in shown
    assert all_bytes(output) == all_bytes(tmp_path / "whole")


def test_a_signal_ends_it_in_good_order(export, large_folder, tmp_path):
    process = _start(export, large_folder, tmp_path / "f")
    _wait_for_shards(process, tmp_path / "f", 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "Stopped by SIGTERM with" in errors and "Traceback" not in errors
    names = all_bytes(tmp_path / "f")
    assert "unfinished.json" in names and not any(name.endswith(".partial") for name in names)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"split": "train"}, "--split train (there: test)"),
        ({"batch_size": 5}, "--batch_size 5 (there: 4)"),
        ({"shard_size": 5}, "--shard_size 5 (there: 12)"),
        ({"format": "tfrecord"}, "--format tfrecord (there: npz)"),
        ({"outputs": ("f1", "f5")}, "--outputs f1,f5 (there: f1)"),
    ],
)
def test_other_settings_are_refused(change, named, export, folder, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "f")
    before = all_bytes(tmp_path / "f")
    with pytest.raises(UserError) as error:
        extraction.extract(make_request(export, folder, tmp_path / "f", **change))
    assert named in str(error.value) and "\n" not in str(error.value)
    assert all_bytes(tmp_path / "f") == before


def test_another_model_is_refused_but_a_moved_one_is_not(export, folder, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "f")
    moved = shutil.copytree(export, tmp_path / "moved")
    extraction.extract(make_request(moved, folder, tmp_path / "f"))
    weights = next((moved / "variables").glob("*.data*"))
    weights.write_bytes(weights.read_bytes() + b"\0")
    with pytest.raises(UserError, match=r"--saved_model .*moved, step 3.*\(there: "):
        extraction.extract(make_request(moved, folder, tmp_path / "f"))


def test_a_model_that_is_replaced_while_it_is_loaded(export, folder, tmp_path, monkeypatch):
    path = shutil.copytree(export, tmp_path / "model")

    def replaced_meanwhile(directory, outputs):
        model = FeatureModel(directory, outputs)
        weights = next((path / "variables").glob("*.data*"))
        weights.write_bytes(weights.read_bytes() + b"\0")
        return model

    monkeypatch.setattr(extraction, "FeatureModel", replaced_meanwhile)
    with pytest.raises(UserError, match="--saved_model: expected the same export during") as error:
        extraction.extract(make_request(path, folder, tmp_path / "f"))
    assert f"another one at {path}" in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "f").exists()


def test_other_images_are_refused(export, tmp_path):
    root = write_tree(tmp_path / "data", small_files(10))
    extraction.extract(make_request(export, root, tmp_path / "f"))
    (root / "test" / "cat" / "001.jpg").rename(root / "test" / "cat" / "002.jpg")
    with pytest.raises(UserError, match="names, sizes or times of the images"):
        extraction.extract(make_request(export, root, tmp_path / "f"))


def test_images_that_changed_under_their_names_are_refused(export, tmp_path):
    root = write_tree(tmp_path / "data", small_files(10))
    extraction.extract(make_request(export, root, tmp_path / "f"))
    extraction.extract(make_request(export, root, tmp_path / "f"))
    path = root / "test" / "cat" / "001.jpg"
    path.write_bytes((root / "test" / "cat" / "003.jpg").read_bytes())
    with pytest.raises(UserError, match="names, sizes or times of the images"):
        extraction.extract(make_request(export, root, tmp_path / "f"))


def test_packed_images_that_changed_under_their_names_are_refused(export, tmp_path):
    root = write_tree(tmp_path / "data", small_files(10))
    prepare_folder.pack(root, tmp_path / "packed", 1000)
    extraction.extract(make_request(export, tmp_path / "packed", tmp_path / "f"))
    (shard,) = (tmp_path / "packed").glob("test*.tfrecord")
    os.utime(shard, ns=(0, 0))
    with pytest.raises(UserError, match="names, sizes or times of the images"):
        extraction.extract(make_request(export, tmp_path / "packed", tmp_path / "f"))


def test_names_that_are_no_files_have_a_digest_of_their_own(tmp_path, monkeypatch):
    source = ArraySource(np.zeros([2, 4, 4, 3], np.uint8), np.zeros(2, np.int32), (), None)
    request = make_request("", "", "", dataset="scenes")
    before = extraction.names_digest(request, source)
    (tmp_path / "scenes" / "test").mkdir(parents=True)
    (tmp_path / "scenes" / "test" / "1").write_text("a file with the name of a scene")
    monkeypatch.chdir(tmp_path)
    assert extraction.names_digest(request, source) == before


@pytest.mark.parametrize("outputs", [("f1",), ("f1", "f5")])
def test_a_model_with_other_rows_than_images(outputs, export, photos):
    loaded = FeatureModel(export, outputs)
    for name in ("_from_images", "_from_files"):
        if whole := getattr(loaded, name):
            setattr(loaded, name, _without_last_row(whole))
    files = [(photos / name).read_bytes() for name in GOOD]
    for some in (files, files[:1]):
        with pytest.raises(UserError, match=r"--saved_model: .* with a row of f1 per image"):
            loaded.of_files(some)


def _without_last_row(signature):
    return lambda **inputs: {name: rows[:-1] for name, rows in signature(**inputs).items()}


def test_workers_get_paths_that_hold_anywhere(export, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(export.parent)
    request = make_request(export.name, folder, tmp_path / "f")
    with extraction.prepared(request) as job:
        assert job.request.saved_model == str(export)


def test_images_that_are_all_bad(export, tmp_path):
    root = write_tree(tmp_path / "data", {"0.jpg": b"no", "1.jpg": b""})
    with pytest.raises(
        UserError, match=r"Received: 2 that cannot, listed in .*skipped_images.*, remove --output"
    ):
        extraction.extract(make_request(export, root, tmp_path / "f", split="train"))
    assert not (tmp_path / "f" / "manifest.json").exists()


def test_two_at_once_are_refused(export, folder, tmp_path):
    (tmp_path / "f").mkdir()
    with directory_locks.locked(tmp_path / "f"), pytest.raises(UserError, match="another extrac"):
        extraction.extract(make_request(export, folder, tmp_path / "f"))


@pytest.mark.parametrize(
    "place, received",
    [
        ("notes", "holds notes.txt"),
        ("file", "is a file"),
        ("file/f", "Not a directory"),
        ("data/f", "--data_dir="),
        ("model/f", "--saved_model="),
        ("gs://bucket/f", "gs://bucket/f"),
        ("shards", "holds features-00000-of-00001.npz"),
        ("damaged", "expected readable JSON"),
        ("damaged", "Remove the whole directory"),
        ("pipe", "manifest.json is not a regular file"),
        ("other", "expected what python -m amdim_tf.extract writes, version 1. Received: "),
    ],
)
def test_places_that_are_refused(place, received, export, folder, tmp_path):
    for name in ("notes", "shards", "damaged", "pipe", "other"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / "manifest.json")
    (tmp_path / "other" / "manifest.json").write_text("{}")
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    (tmp_path / "shards" / "features-00000-of-00001.npz").write_text("whose?")
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    (tmp_path / "file").write_text("")
    (tmp_path / "data").symlink_to(folder)
    (tmp_path / "model").symlink_to(export)
    output = place if "://" in place else tmp_path / place
    with pytest.raises(UserError) as error:
        extraction.extract(make_request(tmp_path / "model", tmp_path / "data", output))
    assert received in str(error.value) and "\n" not in str(error.value)
    assert (tmp_path / "notes" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("damage", ["nothing", "empty", "text", "other signatures"])
def test_directories_that_are_no_export(damage, folder, tmp_path):
    path = tmp_path / "model"
    if damage != "nothing":
        path.mkdir()
    if damage == "text":
        (path / "saved_model.pb").write_text("this is no graph")
    if damage == "other signatures":
        tf.saved_model.save(tf.Module(), str(path))
    with pytest.raises(UserError, match="--saved_model: expected a directory that") as error:
        extraction.extract(make_request(path, folder, tmp_path / "f"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("size", [0, 1000])
def test_weights_that_end_early(size, export, folder, tmp_path):
    path = shutil.copytree(export, tmp_path / "model")
    weights = next((path / "variables").glob("*.data*"))
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(UserError, match=r"--saved_model: .* which cannot be loaded \(") as error:
        extraction.extract(make_request(path, folder, tmp_path / "f"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("outputs", [("f2",), (), ("f1", "f1")])
def test_outputs_that_are_refused(outputs, export, folder, tmp_path):
    with pytest.raises(UserError, match="--outputs: expected some of f1, f5, f7, phi1, phi5, phi7"):
        extraction.extract(make_request(export, folder, tmp_path / "f", outputs=outputs))
    assert not (tmp_path / "f").exists()


def _with_shard(**changes):
    return lambda document: document["shards"][0].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("rows"),
        lambda document: document.update(rows=document["rows"] + 6),
        lambda document: document.update(rows="40"),
        lambda document: document.pop("shards"),
        lambda document: document.update(shards=[3]),
        lambda document: document.update(shapes={"f1": 32}),
        lambda document: document.update(classes=None),
        lambda document: document.update(file_format="csv"),
        lambda document: document.update(saved_model={}),
        _with_shard(name="../features-00000-of-00004.npz"),
        _with_shard(name=None),
        _with_shard(rows=-1),
        _with_shard(rows=True),
        _with_shard(bytes="12"),
    ],
)
def test_a_damaged_manifest_is_one_line(change, finished, tmp_path):
    feature_directory.read_manifest(finished)
    document = json.loads((finished / "manifest.json").read_text())
    change(document)
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(
        UserError, match=r"manifest\.json: expected what .* writes\. Received: .* whole directory"
    ):
        feature_directory.read_manifest(tmp_path)


def test_a_manifest_of_other_shards_is_refused(export, folder, finished, tmp_path):
    features = shutil.copytree(finished, tmp_path / "f")
    document = json.loads((features / "manifest.json").read_text())
    document["rows"] -= document["shards"].pop()["rows"]
    (features / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"the 4 shards of its images\. .* whole directory"):
        extraction.extract(make_request(export, folder, features))


def test_a_full_disk_is_one_line(export, folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(feature_shards, "write", full)
    with pytest.raises(UserError, match=r"--output: .*\(No space left on device\)"):
        extraction.extract(make_request(export, folder, tmp_path / "f"))
    assert set(all_bytes(tmp_path / "f")) == {feature_directory.UNFINISHED}


@pytest.mark.parametrize(
    "flags, named",
    [
        ([], "--saved_model"),
        (["--saved_model=NOWHERE"], "--dataset"),
        (["--saved_model=NOWHERE", "--dataset=folder"], "--output"),
        (["--saved_model=NOWHERE", "--format=csv"], "format"),
        (["--saved_model=NOWHERE", "--split=all"], "split"),
        (["--saved_model=N", "--dataset=scenes", "--output=o", "stray"], "Received: stray"),
    ],
)
def test_mistakes_get_one_line(flags, named):
    assert named in refused("extract", *flags)


def test_the_program(export, photos, tmp_path):
    done = run(
        "extract", f"--saved_model={export}", "--dataset=folder", f"--data_dir={photos}",
        f"--output={tmp_path / 'f'}", "--outputs=f1,phi7", f"--index={tmp_path / 'index'}",
    )  # fmt: skip
    assert f"Wrote {tmp_path / 'f'}: f1, phi7 of 6 images in 1 shards." in done.stdout
    assert f"Wrote {tmp_path / 'index'}: an index of 6 images." in done.stdout
    assert read_npz(tmp_path / "f")["phi7"].shape == (6, 7, 7, 32)
