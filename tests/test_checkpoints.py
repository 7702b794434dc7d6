"""Checkpoints: what comes back, in whichever process and whatever has happened to the files."""

import json
import os
import resource
import shutil
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_model import make_batch, make_config, make_model

import amdim_tf
from amdim_tf import checkpoint_files, config_file
from amdim_tf.checkpoints import Checkpoints
from amdim_tf.errors import UserError

FILES = ("manifest.json", "model.npz", "optimizer.npz", "loop.npz")


def _trained(steps=2, **settings):
    model = make_model(warmup_steps=0, **settings)
    step = tf.function(model.train_step)
    for seed in range(steps):
        step(make_batch(seed=seed))
    return model


def _values(model):
    return [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]


def _save_run(directory, model, step, **settings):
    config_file.save(
        make_config(warmup_steps=0, **settings),
        config_file.path_in(directory),
        {"classes": ["a", "b", "c"]},
    )
    Checkpoints(directory, model).save(step)


def _names(directory):
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def test_loading_leaves_the_caller_s_settings_alone(tmp_path):
    _save_run(tmp_path, make_model(warmup_steps=0), 1)
    keras.config.set_floatx("float64")
    try:
        np.random.seed(7)
        expected = np.random.rand()
        np.random.seed(7)
        loaded = amdim_tf.load_model(tmp_path)
        assert np.random.rand() == expected
        assert keras.config.floatx() == "float64"
    finally:
        keras.config.set_floatx("float32")
    assert {variable.dtype for variable in loaded.trainable_variables} == {"float32"}


def test_weights_and_optimizer_come_back(tmp_path):
    model = _trained()
    Checkpoints(tmp_path, model).save(2)
    other = make_model(warmup_steps=0)
    assert Checkpoints(tmp_path, other).restore_latest().step == 2
    for expected, actual in zip(_values(model), _values(other), strict=True):
        np.testing.assert_array_equal(actual, expected)
    # The next step is the same, which needs the optimizer's state and its step.
    for m in (model, other):
        tf.function(m.train_step)(make_batch(seed=5))
    for expected, actual in zip(model.variables, other.variables, strict=True):
        np.testing.assert_array_equal(actual.numpy(), expected.numpy())


def test_the_loop_s_figures_come_back(tmp_path):
    saved = Checkpoints(tmp_path, make_model())
    loop = {"nonfinite_steps": np.array(3), "window/loss": np.array([1.5, 2.5])}
    saved.begin_to_save(1, loop)
    saved.wait()
    restored = Checkpoints(tmp_path, make_model()).restore_latest().loop
    assert restored.keys() == loop.keys()
    for name, value in loop.items():
        np.testing.assert_array_equal(restored[name], value)


def test_nothing_to_restore(tmp_path):
    assert Checkpoints(tmp_path, make_model()).restore_latest() is None


def test_the_newest_and_every_mth_stay(tmp_path):
    saved = Checkpoints(tmp_path, make_model(), kept=2, keep_every=3)
    for step in range(1, 9):
        saved.save(step)
    assert _names(tmp_path) == [f"step-0000000{step}" for step in (3, 6, 7, 8)]


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    model = _trained(steps=1)
    before = _values(model)
    saved = Checkpoints(tmp_path, model)
    saved.begin_to_save(1, {})
    tf.function(model.train_step)(make_batch(seed=1))  # while the first is being written
    saved.wait()
    other = make_model(warmup_steps=0)
    Checkpoints(tmp_path, other).restore_latest()
    for expected, actual in zip(before, _values(other), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_load_model(tmp_path):
    model = _trained()
    _save_run(tmp_path, model, 2)
    loaded = amdim_tf.load_model(tmp_path)
    images = make_batch()["view1"]
    for name, value in model.encode(images, training=False).items():
        np.testing.assert_array_equal(loaded.encode(images, training=False)[name], value)


def test_load_model_without_checkpoint(tmp_path):
    config_file.save(make_config(), config_file.path_in(tmp_path), {"classes": []})
    with pytest.raises(UserError, match="there is none"):
        amdim_tf.load_model(tmp_path)


@pytest.mark.parametrize("settings", [{"n_depth": 3}, {"n_rkhs": 64}, {"score_clip": 5.0}])
def test_checkpoint_of_another_model_names_the_settings(tmp_path, settings):
    _save_run(tmp_path, make_model(), 2, **settings)
    with pytest.raises(UserError, match="step-00000002") as error:
        amdim_tf.load_model(tmp_path)
    ((name, value),) = settings.items()
    there = getattr(make_model().settings, name)
    assert f"Received other settings: {name} {value} (there: {there})." in str(error.value)


def _rewrite_manifest(path, **changes):
    """Changes fields and mends the digest, as another version of the program would have it."""
    manifest = {**json.loads(path.read_text()), **changes}
    manifest["sha256"] = checkpoint_files._digest_of_manifest(manifest)
    path.write_text(json.dumps(manifest))


def test_checkpoint_of_a_newer_format(tmp_path):
    _save_run(tmp_path, make_model(), 2)
    _rewrite_manifest(tmp_path / "checkpoints/step-00000002/manifest.json", format_version=9)
    with pytest.raises(UserError, match=r"expected .* of format_version 1\. Received: 9"):
        amdim_tf.load_model(tmp_path)


def _damage(path, how):
    contents = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(contents[:-7])
    elif how == "a directory":
        path.unlink()
        path.mkdir()
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    else:  # one bit, at the given share of the file
        place = int(how * (len(contents) - 1))
        flipped = bytes([contents[place] ^ 1])
        path.write_bytes(contents[:place] + flipped + contents[place + 1 :])


@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_the_one_before_used(tmp_path, name, capsys):
    """Each file in turn, in each way; the manifest's spaces are the only bits that may flip."""
    model, other = make_model(), make_model()
    whole = tmp_path / "whole"
    saved = Checkpoints(whole, model, kept=2)
    for step in (1, 2):
        for variable in [*model.variables, *model.optimizer.variables]:
            variable.assign(tf.fill(variable.shape, tf.cast(step, variable.dtype)))
        saved.save(step)
    shares = np.linspace(0, 1, 9)
    for how in ("missing", "empty", "truncated", "a directory", "a pipe", *shares):
        run = tmp_path / "damaged"
        shutil.copytree(whole, run)
        path = run / "checkpoints" / "step-00000002" / name
        before = json.loads(path.read_text()) if name == "manifest.json" else None
        _damage(path, how)
        harmless = before and path.is_file() and _json_or_none(path) == before
        saved = Checkpoints(run, other, kept=2)
        assert saved.restore_latest().step == (2 if harmless else 1), how
        if not harmless:
            assert all((value == 1).all() for value in _values(other))
            error = capsys.readouterr().err
            assert "warning: " in error and "step-00000002" in error and name in error
            # The damaged one is out of the way of the step that is made again.
            saved.make_ready(1)
            assert _names(run) == ["step-00000001", "step-00000002.damaged"]
        shutil.rmtree(run)


def _json_or_none(path):
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None


def test_all_damaged_is_an_error_and_no_new_beginning(tmp_path):
    _save_run(tmp_path, make_model(), 2)
    (tmp_path / "checkpoints/step-00000002/manifest.json").unlink()
    with pytest.raises(
        UserError, match=r"a whole checkpoint\. Received: damaged ones only"
    ) as error:
        amdim_tf.load_model(tmp_path)
    assert "\n" not in str(error.value)


def test_leftovers_are_removed_and_links_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    run = tmp_path / "run"
    directory = run / "checkpoints"
    (directory / "step-00000007.partial").mkdir(parents=True)
    (directory / "step-00000007.partial" / "model.npz").write_bytes(b"half")
    (directory / "step-00000008.partial").symlink_to(outside)
    (directory / "step-00000009").symlink_to(outside)
    saved = Checkpoints(run, make_model())
    assert saved.restore_latest() is None
    saved.make_ready(0)
    saved.save(1)
    saved.save(2)
    assert _names(run) == ["step-00000002", "step-00000009"]
    assert (outside / "precious").read_text() == "kept"


def test_nothing_in_a_checkpoint_is_unpickled(tmp_path):
    """An array of Python objects is pickled in the file; it must be refused, not run."""

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "trapped"),))

    _save_run(tmp_path, make_model(), 2)
    folder = tmp_path / "checkpoints/step-00000002"
    np.savez(folder / "model.npz", trap=np.array([Trap()], dtype=object))
    size = (folder / "model.npz").stat().st_size
    digest = checkpoint_files._digest(folder / "model.npz")
    _rewrite_manifest(
        folder / "manifest.json", files={"model.npz": {"bytes": size, "sha256": digest}}
    )
    with pytest.raises(UserError, match="damaged"):
        amdim_tf.load_model(tmp_path)
    assert not (tmp_path / "trapped").exists()


def test_reading_while_checkpoints_are_removed(tmp_path):
    """A reader never sees half a checkpoint, however fast they come and go."""
    model = make_model()
    _save_run(tmp_path, model, 1)
    done = threading.Event()

    def keep_saving():
        saved, step = Checkpoints(tmp_path, model, kept=1), 1
        while not done.is_set():
            step += 1
            saved.save(step)

    writer = threading.Thread(target=keep_saving)
    writer.start()
    try:
        steps = [amdim_tf.load_model(tmp_path, step_wanted=True)[1] for _ in range(15)]
    finally:
        done.set()
        writer.join()
    assert steps == sorted(steps) and steps[-1] > steps[0]


def test_checkpoints_in_the_way(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    for use in (Checkpoints.restore_latest, lambda saved: saved.save(1)):
        with pytest.raises(UserError, match=r"checkpoints.*Not a directory"):
            use(Checkpoints(tmp_path, make_model()))


def test_storage_that_recovers_is_tried_again(tmp_path, capsys):
    """Writing fails for half a second: the system allows only small files for so long."""
    saved = Checkpoints(tmp_path, make_model())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    recovery = threading.Timer(0.5, resource.setrlimit, (resource.RLIMIT_FSIZE, limits))
    recovery.start()
    try:
        saved.save(2)
    finally:
        recovery.join()
    assert _names(tmp_path) == ["step-00000002"]
    assert "File too large; trying again in 1 s" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["step-000000000004", "step-٠٠٠٠٠٠٠٩", "step-4"])
def test_names_that_no_checkpoint_has(tmp_path, name):
    (tmp_path / name).mkdir()
    assert checkpoint_files.steps_in(tmp_path) == []


def test_weights_that_are_not_finite_are_refused(tmp_path):
    """A ReLU makes zero of NaN, so that features may look sound."""
    model = make_model()
    kernel = model.encoder.trainable_variables[0]
    kernel.assign(tf.concat([kernel[:1] * np.nan, kernel[1:]], axis=0))
    _save_run(tmp_path, model, 2)
    with pytest.raises(UserError, match=r"expected finite weights\. Received: others in ") as error:
        amdim_tf.load_model(tmp_path)
    assert kernel.path in str(error.value)
