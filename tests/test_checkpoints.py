"""Checkpoints: what comes back, in whichever process and whatever was built before."""

import numpy as np
import pytest
import tensorflow as tf
from test_model import make_batch, make_config, make_model

import amdim_tf
from amdim_tf import config as config_lib
from amdim_tf.checkpoints import Checkpoints
from amdim_tf.errors import UserError


def _trained(steps=2, **settings):
    model = make_model(warmup_steps=0, **settings)
    step = tf.function(model.train_step)
    for seed in range(steps):
        step(make_batch(seed=seed))
    return model


def _values(variables):
    return [np.asarray(variable) for variable in variables]


def _save_run(directory, model, step, **settings):
    config_lib.save(
        make_config(warmup_steps=0, **settings),
        config_lib.path_in(directory),
        {"classes": ["a", "b", "c"]},
    )
    Checkpoints(directory, model).save(step)


def test_weights_and_optimizer_come_back(tmp_path):
    model = _trained(use_bn=True)
    Checkpoints(tmp_path, model).save(2)
    other = make_model(warmup_steps=0, use_bn=True)
    assert Checkpoints(tmp_path, other).restore_latest() == 2
    for group in ("variables", "optimizer"):
        pair = [m.variables if group == "variables" else m.optimizer.variables
                for m in (model, other)]  # fmt: skip
        for expected, actual in zip(_values(pair[0]), _values(pair[1]), strict=True):
            np.testing.assert_array_equal(actual, expected)
    # The next step is the same, which needs the optimizer's state and its step.
    for m in (model, other):
        tf.function(m.train_step)(make_batch(seed=5))
    for expected, actual in zip(_values(model.variables), _values(other.variables), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_nothing_to_restore(tmp_path):
    assert Checkpoints(tmp_path, make_model()).restore_latest() is None


def test_the_newest_stay(tmp_path):
    saved = Checkpoints(tmp_path, make_model(), kept=2)
    for step in (1, 2, 3):
        saved.save(step)
    names = {path.name for path in (tmp_path / "checkpoints").glob("*.index")}
    assert names == {"step-2.index", "step-3.index"}


def test_load_model(tmp_path):
    model = _trained()
    _save_run(tmp_path, model, 2)
    loaded = amdim_tf.load_model(tmp_path)
    images = make_batch()["view1"]
    for name, value in model.encode(images, training=False).items():
        np.testing.assert_array_equal(loaded.encode(images, training=False)[name], value)


def test_load_model_without_checkpoint(tmp_path):
    config_lib.save(make_config(), config_lib.path_in(tmp_path), {"classes": []})
    with pytest.raises(UserError, match="there is none"):
        amdim_tf.load_model(tmp_path)


@pytest.mark.parametrize("settings", [{"n_depth": 3}, {"n_rkhs": 64}, {"use_bn": True}])
def test_checkpoint_of_another_model(tmp_path, settings):
    _save_run(tmp_path, _trained(), 2, **settings)
    with pytest.raises(UserError, match="step-2") as error:
        amdim_tf.load_model(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, contents",
    [
        ("step-2.index", b"not an index"),
        ("step-2.data-00000-of-00001", b""),
        ("step-2.data-00000-of-00001", b"\0" * 500),
        ("step-2.data-00000-of-00001", None),
        ("checkpoint", b""),
        ("checkpoint", b"\xfc\x00"),
        ("checkpoint", b'model_checkpoint_path: "best"\nall_model_checkpoint_paths: "best"\n'),
    ],
)
def test_damaged_checkpoint(tmp_path, name, contents):
    _save_run(tmp_path, _trained(steps=1), 2)
    path = tmp_path / "checkpoints" / name
    path.unlink() if contents is None else path.write_bytes(contents)
    with pytest.raises(UserError, match="checkpoint") as error:
        amdim_tf.load_model(tmp_path)
    assert "\n" not in str(error.value)
