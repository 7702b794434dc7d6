"""Features: extracted once, in order, again when anything that they depend on changes."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from pictures import encoded, picture

from amdim_tf import config as config_lib
from amdim_tf import features
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


def test_another_key_takes_the_place_of_the_first(tmp_path):
    function = _Counting()
    for key, count in (("one", 7), ("two", 9)):
        found = features.cached_features(
            tmp_path / "set", key, function, _source(count), CONFIG, "test"
        )
        assert len(found.values) == count
    assert function.calls == 2
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize("name", ["values.npy", "labels.npy", "key.json"])
def test_damaged_features_are_extracted_again(tmp_path, name):
    function = _Counting()

    def extract():
        return features.cached_features(
            tmp_path / "set", "key", function, _source(), CONFIG, "test"
        )

    extract()
    path = tmp_path / "set" / name
    path.write_bytes(path.read_bytes()[:-5])
    assert len(extract().values) == 7
    assert function.calls == 2


def test_images_that_cannot_be_decoded_are_left_out(tmp_path):
    files = [encoded(picture(40, 40, seed)) for seed in range(5)]
    files[1] = b"\xff\xd8\xff not a picture"
    contents = tf.constant(files)
    source = EncodedSource(
        5, lambda index: (contents[index], tf.cast(index, tf.int32)), str, ("a",) * 5,
        SkippedImages(5, 0.5),
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
