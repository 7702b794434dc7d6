"""Order, shards and restarts of the training batches; the evaluation batches."""

import numpy as np
import pytest
import tensorflow as tf

from amdim_tf import config as config_lib
from amdim_tf import input_pipeline
from amdim_tf.errors import UserError
from amdim_tf.examples import ArraySource, SkippedImages


def _source(count=50, size=32):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, [count, size, size, 3]).astype(np.uint8)
    labels, names = np.arange(count, dtype=np.int32), tuple(map(str, range(count)))
    return ArraySource(images, labels, names, SkippedImages(count, 0.05))


def _config(**settings):
    return config_lib.make({"dataset": "cifar10", "batch_size": 8, **settings})


def _batches(*args, **kwargs):
    return list(input_pipeline.training_batches(*args, **kwargs).as_numpy_iterator())


def test_each_epoch_is_a_permutation_of_its_own():
    labels = [batch["label"] for batch in _batches(_source(), _config(), 0, 12)]
    epochs = [np.concatenate(labels[start : start + 6]) for start in (0, 6)]
    for epoch in epochs:
        assert len(set(epoch)) == 48
    assert list(epochs[0]) != list(epochs[1])
    assert list(epochs[0]) != sorted(epochs[0])


def test_any_step_can_be_rebuilt():
    all_batches = _batches(_source(), _config(), 0, 9)
    for begin in (3, 7):
        for expected, batch in zip(
            all_batches[begin:], _batches(_source(), _config(), begin, 9), strict=True
        ):
            for name, value in expected.items():
                np.testing.assert_array_equal(batch[name], value)


def test_shards_make_up_the_batch():
    for whole, first, second in zip(
        _batches(_source(), _config(), 0, 2),
        _batches(_source(), _config(), 0, 2, shard=0, shards=2),
        _batches(_source(), _config(), 0, 2, shard=1, shards=2),
        strict=True,
    ):
        for name, value in whole.items():
            parts = np.concatenate([first[name], second[name]])
            np.testing.assert_allclose(parts, value, atol=1e-4)


def test_seed_changes_order_and_views():
    one = _batches(_source(), _config(seed=0), 0, 1)[0]
    other = _batches(_source(), _config(seed=1), 0, 1)[0]
    assert list(one["label"]) != list(other["label"])
    assert np.any(one["view1"] != other["view1"])


def test_shapes_are_static():
    dataset = input_pipeline.training_batches(_source(), _config(), 0, 1)
    assert dataset.element_spec["view1"].shape == (8, 32, 32, 3)
    assert dataset.element_spec["label"].shape == (8,)


def test_images_in_memory_stay_off_the_gpu():
    placement = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(False)
    try:
        with tf.device("GPU:0"):  # where constants go by default, on a machine that has one
            images, labels = input_pipeline._constants(_source())
    finally:
        tf.config.set_soft_device_placement(placement)
    assert "CPU:0" in images.device and "CPU:0" in labels.device


def test_batch_larger_than_the_data():
    assert input_pipeline.steps_per_epoch(_source(), 50) == 1
    with pytest.raises(UserError, match="at most 50"):
        input_pipeline.steps_per_epoch(_source(), 51)


def test_evaluation_keeps_every_image_in_order():
    source, config = _source(count=11), _config()
    batches = list(input_pipeline.evaluation_batches(source, config, 4).as_numpy_iterator())
    assert [len(labels) for _, labels in batches] == [4, 4, 3]
    assert list(np.concatenate([labels for _, labels in batches])) == list(range(11))
    pixels = np.concatenate([images for images, _ in batches]) * np.array(
        config.views.std
    ) + np.array(config.views.mean)
    np.testing.assert_allclose(pixels, source.images, atol=1e-3)
