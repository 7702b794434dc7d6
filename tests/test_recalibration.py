"""Batch-norm statistics measured anew."""

import numpy as np
import pytest

from amdim_tf import config as config_lib
from amdim_tf import views
from amdim_tf.blocks import BatchNorm
from amdim_tf.checkpoints import build_model
from amdim_tf.errors import UserError
from amdim_tf.examples import ArraySource, SkippedImages
from amdim_tf.recalibration import recalibrate

CONFIG = config_lib.make({"dataset": "scenes", "ndf": 4, "n_rkhs": 16, "n_depth": 1})


def _source(count):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, [count, 32, 32, 3]).astype(np.uint8)
    return ArraySource(images, np.zeros(count, np.int32), ("a",), SkippedImages(count, 0.05))


def _norm(model):
    (layer,) = (one for one in model.encoder._flatten_layers() if isinstance(one, BatchNorm))
    return layer


def test_statistics_are_the_mean_over_whole_batches():
    source, model = _source(600), build_model(CONFIG, 0)
    layer = _norm(model)
    layer.moving_mean.assign(layer.moving_mean + 100)  # what was there before does not count
    seen = []
    original = layer.call
    layer.call = lambda inputs, **options: (
        seen.append(inputs.numpy()) or original(inputs, **options)
    )
    recalibrate(model, source, CONFIG, 550, 0)  # two batches of 250
    assert [len(batch) for batch in seen] == [250, 250]
    flat = [batch.reshape(-1, batch.shape[-1]) for batch in seen]
    mean = np.mean([batch.mean(axis=0) for batch in flat], axis=0)
    variance = np.mean([batch.var(axis=0, ddof=1) for batch in flat], axis=0)
    np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.moving_variance.numpy(), variance, rtol=1e-4, atol=1e-5)
    assert layer.momentum == 0.9


def test_nothing_else_changes():
    source, model = _source(300), build_model(CONFIG, 0)
    before = [variable.numpy() for variable in model.trainable_variables]
    recalibrate(model, source, CONFIG, 300, 0)
    for variable, value in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    features = model.encode(views.evaluation_view(CONFIG.views, source.images, 32))["f1"].numpy()
    assert np.abs(features.mean(axis=0)).max() < 0.2


def test_images_of_every_class_count_for_encoder_and_embeddings():
    source, model = _source(1000), build_model(CONFIG, 0)
    source.images[:500] //= 8  # a dark class comes first, as in a folder
    recalibrate(model, source, CONFIG, 250, 0)
    outputs = model.encode(views.evaluation_view(CONFIG.views, source.images, 32))
    for name in ("f1", "phi5", "phi7"):  # each is what a batch norm gives
        means = outputs[name].numpy().reshape(-1, 16).mean(axis=0)
        assert np.abs(means).max() < 0.2, name


def test_less_than_a_batch_is_refused():
    with pytest.raises(UserError, match="at least 250"):
        recalibrate(build_model(CONFIG, 0), _source(300), CONFIG, 200, 0)
