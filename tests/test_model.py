"""The model: outputs, one training step, what learns and what does not."""

import numpy as np
import pytest
import tensorflow as tf

from amdim_tf import config as config_lib
from amdim_tf import costs, training_loop, training_step


def make_config(**settings):
    return config_lib.make({"ndf": 4, "n_rkhs": 32, "n_depth": 2, "batch_size": 8, **settings})


def make_model(classes=3, **settings):
    return training_loop.compiled_model(make_config(**settings), classes, per_epoch=10)


def make_batch(size=32, batch=8, labels=(0, 1, 2, 0, 1, 2, -1, -1), seed=0):
    rng = np.random.default_rng(seed)
    first = rng.standard_normal([batch, size, size, 3]).astype(np.float32)
    second = first + 0.1 * rng.standard_normal(first.shape).astype(np.float32)
    labels = tf.constant(labels[:batch], tf.int32)
    return {"view1": tf.constant(first), "view2": tf.constant(second), "label": labels}


@pytest.mark.parametrize("size", [32, 64, 128])
def test_encode_names_every_output(size):
    model = make_model(image_size=size)
    encoded = model.encode(tf.zeros([2, size, size, 3]), training=False)
    channels = 16 if size == 32 else 32
    assert {name: tuple(value.shape) for name, value in encoded.items()} == {
        "f1": (2, 32), "f5": (2, 5, 5, channels), "f7": (2, 7, 7, channels),
        "phi1": (2, 32), "phi5": (2, 5, 5, 32), "phi7": (2, 7, 7, 32),
    }  # fmt: skip
    np.testing.assert_array_equal(encoded["phi1"], encoded["f1"])


@pytest.mark.parametrize("task, untouched", [("5to5", 3), ("7to7", 5), ("5to7", 3), ("7to1", 0)])
def test_a_task_without_f1_leaves_the_stages_above_it_alone(task, untouched):
    model = make_model(tasks=(task,), warmup_steps=0)
    before = [variable.numpy() for variable in model.encoder.trainable_variables]
    logs = tf.function(model.train_step)(make_batch())
    assert float(logs["nonfinite"]) == 0
    for value, variable in zip(before, model.encoder.trainable_variables, strict=True):
        stage = variable.path.split("/")[2]
        sides = {"block_5": 5, "block_3": 3, "top": 1, "norm_1": 1}
        moved = bool(np.any(variable.numpy() != value))
        assert moved == (sides.get(stage, 7) > untouched), variable.path


def test_a_step_moves_every_weight_and_statistic():
    model = make_model(use_bn=True, warmup_steps=0)
    before = {variable.path: variable.numpy() for variable in model.variables}
    tf.function(model.train_step)(make_batch())
    unmoved = [
        variable.path
        for variable in model.variables
        if np.array_equal(variable.numpy(), before[variable.path])
    ]
    # Zero-initialized last convolutions hide the ones before them in the very first step.
    assert all(path.endswith("conv1/kernel") or "/norm" in path for path in unmoved), unmoved
    tf.function(model.train_step)(make_batch())
    for variable in model.variables:
        assert not np.array_equal(variable.numpy(), before[variable.path]), variable.path


def test_loss_goes_down_on_one_batch():
    model = make_model(warmup_steps=0, learning_rate=1e-2)
    step, batch = tf.function(model.train_step), make_batch()
    losses = [float(step(batch)["loss"]) for _ in range(30)]
    assert losses[-1] < losses[0] - 1


def test_works_with_keras_fit():
    model = make_model()
    dataset = tf.data.Dataset.from_tensors(make_batch()).repeat(3)
    history = model.fit(dataset, epochs=1, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert int(model.optimizer.iterations) == 3


def test_classifiers_send_no_gradient_to_the_encoder():
    batch, step = make_batch(), tf.constant(0)
    model = make_model()
    encoder_weights = [v.value for v in model.encoder.trainable_variables]
    with tf.GradientTape() as tape:
        f1 = model.encoder(batch["view1"], training=True)["f1"]
        noise = model.draw([8, 32 + model.mlp.hidden], step, key=2)
        logits = model.classify(f1, noise, training=True)
        loss, _ = training_step.classifier_losses(logits, batch["label"], labelled=6.0)
    assert all(gradient is None for gradient in tape.gradient(loss, encoder_weights))


def test_unlabelled_data_has_no_classifiers():
    model = make_model(classes=0)
    logs = tf.function(model.train_step)(make_batch(labels=(-1,) * 8))
    assert model.linear is None and model.mlp is None
    assert not any(name.startswith(("linear", "mlp")) for name in logs)


def test_an_embedding_without_a_task_stays_as_it_is():
    model = make_model(tasks=("1to7",), warmup_steps=0)
    before = [variable.numpy() for variable in model.embedding5.variables]
    tf.function(model.train_step)(make_batch())
    for old, variable in zip(before, model.embedding5.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)


def test_logs_add_up():
    model = make_model()
    logs = {name: float(value) for name, value in model.train_step(make_batch()).items()}
    assert logs["loss"] == pytest.approx(sum(logs[f"loss_{t}"] for t in model.settings.tasks))
    assert logs["labelled"] == 12
    assert logs["learning_rate"] == pytest.approx(2e-4 / 500)
    assert logs["gradient_norm"] > 0


def test_locations_are_uniform_and_independent():
    model = make_model(tasks=("5to5", "7to5"))
    drawn = model.draw_locations(4000, tf.constant(3))
    assert set(drawn) == {5, 7}
    for scale, locations in drawn.items():
        cells = scale * scale
        counts = np.bincount(np.ravel(locations), minlength=cells)
        assert len(counts) == cells
        # Chi-square against uniform; the 0.1% quantile is near cells + 3.1·sqrt(2·cells) + 6.
        expected = 8000 / cells
        assert ((counts - expected) ** 2 / expected).sum() < cells + 3.1 * np.sqrt(2 * cells) + 6
        assert abs(np.corrcoef(locations[0], locations[1])[0, 1]) < 0.06
    again, other = (model.draw_locations(4000, tf.constant(step))[5] for step in (3, 4))
    np.testing.assert_array_equal(drawn[5], again)
    assert np.any(drawn[5] != other)


def test_variable_paths_are_unique():
    model = make_model(use_bn=True)
    paths = [variable.path for variable in (*model.variables, *model.optimizer.variables)]
    assert len(paths) == len(set(paths))


def test_same_seed_same_weights():
    one, two, other = make_model(seed=1), make_model(seed=1), make_model(seed=2)
    kernels = [model.encoder.stages[0].kernel.numpy() for model in (one, two, other)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert np.any(kernels[0] != kernels[2])


def test_costs_of_the_paper_size():
    # (128, 1024, 10) at size 32: 12.7 GFLOP for the encoder and embeddings of one image pair.
    config = config_lib.make({"ndf": 128, "n_rkhs": 1024, "n_depth": 10})
    model = training_loop.compiled_model(config, 10, per_epoch=1)
    assert 6 * costs.forward_flops(model) / 1e9 == pytest.approx(12.7, abs=0.05)
    assert costs.step_flops(model, 32) > 32 * 6 * costs.forward_flops(model)


def test_costs_by_hand():
    # One kernel position costs two operations for each weight.
    model = make_model(classes=0, tasks=("1to7",), n_depth=1)
    stages = [(30, 3 * 9 * 4), (30, 4 * 4 * 2), (14, 16 * 4 * 8 + 64), (7, 4 * 8 * 16 + 256)]
    stages += [(5, 9 * 16 * 16 + 256), (3, 9 * 16 * 16 + 256), (1, 9 * 16 * 32 + 1024)]
    stages += [(7, 16 * 32 + 32 * 32 + 16 * 32)]
    expected = sum(2 * side * side * weights for side, weights in stages)
    assert costs.forward_flops(model) == expected


def test_preprocess_makes_what_encode_takes():
    model = make_model()
    images = np.random.default_rng(0).integers(0, 256, [2, 40, 50, 3]).astype(np.uint8)
    assert model.encode(model.preprocess(images))["f1"].shape == (2, 32)


@pytest.mark.parametrize(
    "images",
    [
        np.zeros([2, 32, 32, 3], np.uint8),
        np.zeros([2, 64, 64, 3], np.float32),
        np.zeros([32, 32, 3], np.float32),
        np.zeros([2, 3, 32, 32], np.float32),
    ],
)
def test_encode_says_what_it_expects(images):
    with pytest.raises(ValueError, match=r"\[N, 32, 32, 3\].*Received: shape"):
        make_model().encode(images)


@pytest.mark.parametrize(
    "images",
    [
        np.zeros([32, 32, 3], np.uint8),
        np.zeros([2, 32, 32, 3], np.float32),
        np.zeros([2, 32, 32, 4], np.uint8),
        "photo.jpg",
    ],
)
def test_preprocess_says_what_it_expects(images):
    with pytest.raises(ValueError, match=r"expected uint8 images \[N, H, W, 3\]\. Received: "):
        make_model().preprocess(images)


def test_a_posterior_needs_a_mixture():
    model = make_model()
    outputs = model.encode(np.zeros([2, 32, 32, 3], np.float32))
    with pytest.raises(ValueError, match="expected a model with a mixture"):
        model.posterior(outputs["f1"], outputs["phi7"])
