"""Classifiers on augmented images: they learn, the encoder does not."""

import numpy as np
import pytest

from amdim_tf import augmented_probes, features, views
from amdim_tf import config as config_lib
from amdim_tf.checkpoints import build_model
from amdim_tf.examples import ArraySource, SkippedImages
from amdim_tf.feature_splits import Features

CONFIG = config_lib.make(
    {
        "dataset": "scenes", "ndf": 8, "n_rkhs": 32, "n_depth": 1, "batch_size": 32,
        "jitter": (0.0, 0.0, 0.0, 0.0), "grayscale": 0.0,
    }
)  # fmt: skip


def _colours(count, seed):
    """Noisy red, green and blue images."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count).astype(np.int32)
    images = rng.integers(0, 128, [count, 32, 32, 3])
    images[np.arange(count), :, :, labels] += 100
    return ArraySource(
        images.astype(np.uint8), labels, ("red", "green", "blue"), SkippedImages(count, 0.05)
    )


@pytest.mark.slow
def test_classifiers_learn_and_the_encoder_stays():
    model, train, test = build_model(CONFIG, 3), _colours(640, 0), _colours(200, 1)
    digest = features.weights_digest(model)
    f1 = model.encode(views.evaluation_view(CONFIG.views, test.images, 32))["f1"].numpy()
    results = augmented_probes.evaluate(
        model, train, Features(f1, test.labels), CONFIG, ("linear", "mlp"), epochs=12, seed=0
    )
    assert features.weights_digest(model) == digest
    for name in ("linear", "mlp"):
        assert results[name]["accuracy"] > 0.9
        settings = results[name]["settings"]
        assert settings["epochs"] == 12 and settings["held_out_images"] == 32
        assert settings["learning_rate"] in [row["learning_rate"] for row in settings["grid"]]


def test_held_out_images_are_not_trained_on():
    source = _colours(100, 0)
    kept, held_out = augmented_probes._split(source, seed=3)
    assert (len(kept), len(held_out)) == (95, 5)
    together = np.concatenate([kept.images, held_out.images])
    assert {image.tobytes() for image in together} == {image.tobytes() for image in source.images}


def test_schedules_of_the_reference():
    assert augmented_probes.schedule("cifar10", 0) == (120, [80, 110])
    assert augmented_probes.schedule("imagenet2012", 0) == (30, [15, 25])
    assert augmented_probes.schedule("places205", 0) == (15, [7, 12])
    assert augmented_probes.schedule("cifar10", 12) == (12, [8, 11])
