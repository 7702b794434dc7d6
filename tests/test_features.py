"""Features: extracted once, in order, again when anything that they depend on changes."""

import dataclasses
import errno
import io
import resource
import threading

import numpy as np
import pytest
import tensorflow as tf
from pictures import encoded, picture, write_tree

from amdim_tf import config as config_lib
from amdim_tf import directory_locks, features, sources
from amdim_tf.checkpoints import build_model
from amdim_tf.examples import ArraySource, EncodedSource, SkippedImages

CONFIG = config_lib.make({"dataset": "scenes", "ndf": 4, "n_rkhs": 16, "n_depth": 1})


def _source(count=7, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, [count, 32, 32, 3]).astype(np.uint8)
    labels = np.arange(count, dtype=np.int32) % 2
    return ArraySource(images, labels, ("a", "b"), SkippedImages(count, 0.05))


class _Counting:
    """Mean colours, and how often they were asked for."""

    def __init__(self):
        self.calls = 0

    def __call__(self, images):
        self.calls += 1
        return tf.reduce_mean(images, axis=[1, 2])


@pytest.mark.parametrize("count", [1, 2, 5, 33])
def test_f1_of_any_number_of_images(count):
    model = build_model(CONFIG, 3, "float32")
    for number, weight in enumerate(model.encoder.trainable_variables):
        if "conv2" in weight.path:  # zeros at first, which would hide what comes before
            weight.assign(0.3 * tf.random.stateless_normal(weight.shape, seed=[1, number]))
    images = tf.random.stateless_normal([count, 32, 32, 3], seed=[0, count])
    expected = model.encode(images)["f1"]
    np.testing.assert_allclose(features.f1_of(model)(images), expected, rtol=1e-4, atol=1e-5)


def test_features_are_extracted_once(tmp_path):
    function, source = _Counting(), _source()
    first, again = (
        features.cached_features(tmp_path / "set", "key", function, source, CONFIG, "test")
        for _ in range(2)
    )
    assert function.calls == 1
    np.testing.assert_array_equal(first.values, again.values)
    np.testing.assert_array_equal(first.labels, source.labels)
    mean, std = CONFIG.views.mean, CONFIG.views.std
    expected = (source.images.mean(axis=(1, 2)) - mean) / std
    np.testing.assert_allclose(first.values, expected, rtol=1e-4, atol=1e-4)


def test_what_a_killed_extraction_left_is_removed(tmp_path):
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "values.npy").write_bytes(b"half of it")
    features.cached_features(tmp_path / "set", "key", _Counting(), _source(), CONFIG, "test")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_another_key_takes_the_place_of_the_first(tmp_path):
    function = _Counting()
    for key, count in (("one", 7), ("two", 9)):
        found = features.cached_features(
            tmp_path / "set", key, function, _source(count), CONFIG, "test"
        )
        assert len(found.values) == count
    assert function.calls == 2
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def _npy(array):
    contents = io.BytesIO()
    np.save(contents, array)
    return contents.getvalue()


def _refused(tmp_path, name, damage):
    """Whether features are extracted again after `damage`, bytes -> bytes, to a file of them."""
    function = _Counting()
    arguments = (tmp_path / "set", "key", function, _source(), CONFIG, "test")
    before = features.cached_features(*arguments)
    path = tmp_path / "set" / name
    contents = damage(path.read_bytes())
    path.unlink()  # the map of the features before stays as it is
    path.write_bytes(contents)
    after = features.cached_features(*arguments)
    np.testing.assert_array_equal(after.values, before.values)
    np.testing.assert_array_equal(after.labels, before.labels)
    return function.calls == 2


@pytest.mark.parametrize("name", ["values.npy", "labels.npy", "key.json"])
@pytest.mark.parametrize(
    "damage", [lambda old: old[:-5], lambda old: b"", lambda old: b"[" * 9000, lambda old: b"\xff"]
)
def test_damaged_features_are_extracted_again(tmp_path, name, damage):
    assert _refused(tmp_path, name, damage)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("labels.npy", np.int32(1)),
        ("labels.npy", np.array(["a"] * 7)),
        ("labels.npy", np.zeros(7, np.float32)),
        ("labels.npy", np.zeros(6, np.int32)),
        ("values.npy", np.zeros([7, 2], np.float32)),
        ("values.npy", np.zeros([7, 3], np.int32)),
        ("values.npy", np.zeros(21, np.float32)),
    ],
)
def test_arrays_of_another_kind_are_extracted_again(tmp_path, name, array):
    assert _refused(tmp_path, name, lambda _: _npy(array))


@pytest.mark.parametrize("name", ["values.npy", "labels.npy"])
@pytest.mark.parametrize("part", [(b"(7", b"(3"), (b"(7,", b"(7"), (b"<", b"'"), (b"4'", b"8'")])
def test_damaged_headers_are_extracted_again(tmp_path, name, part):
    assert _refused(tmp_path, name, lambda old: old.replace(*part).ljust(len(old)))


def test_a_header_that_claims_terabytes_is_extracted_again(tmp_path):
    claim = (b"(7,), }" + b" " * 12, b"(1000000000000,), }")
    assert _refused(tmp_path, "labels.npy", lambda old: old.replace(*claim))


def test_a_full_disk_is_an_error_that_leaves_nothing_aside(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    arguments = (tmp_path / "set", "key", _Counting(), _source(200), CONFIG, "test")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            features.cached_features(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_the_blocks_of_a_new_map_are_taken_at_once(tmp_path):
    path = tmp_path / "values.npy"
    values = features._new_map(path, (1000, 1000))
    assert values.shape == (1000, 1000)
    assert path.stat().st_blocks * 512 >= values.nbytes  # a file with holes has fewer


def test_evaluations_at_once_extract_once(tmp_path, capsys):
    function, found = _Counting(), []

    def evaluate():
        arguments = (tmp_path / "set", "key", function, _source(), CONFIG, "test")
        found.append(features.cached_features(*arguments).values.tolist())

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    with directory_locks.locked(tmp_path):
        for thread in threads:
            thread.start()
        threads[0].join(0.3)
        assert not found and not list(tmp_path.iterdir())
    for thread in threads:
        thread.join()
    assert function.calls == 1 and found[0] == found[1]
    assert f"{tmp_path}: another process is writing there" in capsys.readouterr().err


def test_a_file_system_without_locks_still_holds_features(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(directory_locks.fcntl, "flock", refuse)
    arguments = (tmp_path / "set", "key", _Counting(), _source(), CONFIG, "test")
    assert len(features.cached_features(*arguments).values) == 7
    assert "this file system has no locks" in capsys.readouterr().err


@pytest.mark.parametrize("size", [32, 128])
def test_pixels_are_means_of_squares(size):
    images = np.random.default_rng(0).standard_normal([2, size, size, 3]).astype(np.float32)
    side = size // 32
    expected = images.reshape(2, 32, side, 32, side, 3).mean(axis=(2, 4)).reshape(2, -1)
    np.testing.assert_allclose(features.pixels_of(tf.constant(images)), expected, atol=1e-6)


def test_images_that_cannot_be_decoded_are_left_out(tmp_path):
    files = [encoded(picture(40, 40, seed)) for seed in range(5)]
    files[1] = b"\xff\xd8\xff not a picture"
    source = EncodedSource(
        5, files.__getitem__, lambda stored, index: (stored, tf.cast(index, tf.int32)), str, str,
        ("a",) * 5, SkippedImages(5, 0.5),
    )  # fmt: skip
    found = features.cached_features(tmp_path / "set", "key", _Counting(), source, CONFIG, "test")
    assert found.labels.tolist() == [0, 2, 3, 4]
    assert found.values.shape == (4, 3)
    assert source.skipped.names == ["1"]


def test_the_key_follows_weights_images_and_view():
    model = build_model(CONFIG, 2)
    digest = features.weights_digest(model)
    assert digest == features.weights_digest(build_model(CONFIG, 2))
    key = features.features_key(digest, _source(), CONFIG)
    assert key == features.features_key(digest, _source(), CONFIG)
    assert key != features.features_key(digest, _source(seed=1), CONFIG)
    views = dataclasses.replace(CONFIG.views, evaluation_resize=40)
    assert key != features.features_key(digest, _source(), dataclasses.replace(CONFIG, views=views))
    statistics = model.encoder.non_trainable_variables[0]
    statistics.assign(statistics + 1)
    assert features.weights_digest(model) != digest


def test_the_key_follows_the_files(tmp_path, monkeypatch):
    """Images of other folders, or later ones, may have the same names."""
    for name in ("one", "other"):
        files = {f"train/a/{n}.jpg": picture(200, 160, n) for n in range(2)}
        write_tree(tmp_path / name / "data", files)

    def key(place):
        monkeypatch.chdir(tmp_path / place)
        data = dataclasses.replace(CONFIG.data, dataset="folder", data_dir="data")
        return features.features_key("weights", sources.load(data, "train"), CONFIG)

    first = key("one")
    assert first == key("one") != key("other")
    (tmp_path / "one" / "data" / "train" / "a" / "0.jpg").write_bytes(encoded(picture(200, 160, 7)))
    assert key("one") != first


def test_changed_bytes_of_cached_features_are_noticed(tmp_path):
    function = _Counting()
    first = features.cached_features(tmp_path / "set", "key", function, _source(), CONFIG, "test")
    expected, calls = np.array(first.values), function.calls
    path = tmp_path / "set" / "values.npy"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    again = features.cached_features(tmp_path / "set", "key", function, _source(), CONFIG, "test")
    assert function.calls == 2 * calls
    np.testing.assert_array_equal(again.values, expected)
