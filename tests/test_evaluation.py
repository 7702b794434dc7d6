"""The evaluation program, and the linear probe of the reference's figures."""

import json
import types

import numpy as np
import pytest
from pictures import write_tree
from PIL import Image
from test_train import TINY, refused, run

from amdim_tf import checkpoints, config_file, evaluation, evaluation_files, policies
from amdim_tf import config as config_lib
from amdim_tf.errors import UserError
from amdim_tf.feature_splits import Features
from amdim_tf.linear_adam import linear_accuracy


def _clusters(count, rng, spread):
    labels = rng.integers(0, 3, count).astype(np.int32)
    centres = np.array([[0, 0, 3], [0, 3, 0], [3, 0, 0]], np.float32)
    noise = spread * rng.standard_normal([count, 3])
    return Features((centres[labels] + noise).astype(np.float32), labels)


def test_linear_probe_separates_what_is_separable():
    rng = np.random.default_rng(0)
    assert linear_accuracy(_clusters(1500, rng, 0.2), _clusters(400, rng, 0.2), 3) == 1.0


def test_linear_probe_is_at_chance_on_noise():
    rng = np.random.default_rng(1)
    train, test = (
        Features(rng.standard_normal([n, 5]).astype(np.float32), rng.integers(0, 4, n))
        for n in (2000, 1000)
    )
    assert abs(linear_accuracy(train, test, 4) - 0.25) < 0.06


def test_test_images_do_not_influence_the_probe():
    rng = np.random.default_rng(2)
    train, test = _clusters(900, rng, 1.5), _clusters(300, rng, 1.5)
    poison = Features(np.concatenate([test.values, 1e6 * test.values]), np.tile(test.labels, 2))
    alone = linear_accuracy(train, test, 3)
    together = linear_accuracy(train, poison, 3)
    # Were test statistics used, the huge copies would squash the first half.
    first = linear_accuracy(train, Features(poison.values[:300], poison.labels[:300]), 3)
    assert first == alone
    assert together != alone


def test_features_of_very_different_scale():
    rng = np.random.default_rng(3)
    train, test = _clusters(900, rng, 0.2), _clusters(300, rng, 0.2)
    scale, shift = np.array([1e3, 1e-3, 1], np.float32), np.array([5e3, 0, -2], np.float32)
    scaled = [Features(part.values * scale + shift, part.labels) for part in (train, test)]
    assert linear_accuracy(*scaled, 3) > 0.99


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run of two steps."""
    model_dir = tmp_path_factory.mktemp("run") / "run"
    run("train", f"--model_dir={model_dir}", *TINY, "--train_steps=2")
    return model_dir


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """A folder of red and green images."""
    return _colour_folder(tmp_path_factory.mktemp("colours"))


def _colour_folder(root, test_shade=200, classes=("green", "red")):
    rng = np.random.default_rng(0)
    for split, count, names in (("train", 260, ("green", "red")), ("test", 8, classes)):
        for name in names:
            for number in range(count):
                image = rng.integers(0, 100, [32, 32, 3]).astype(np.uint8)
                image[..., 0 if name == "red" else 1] = test_shade if split == "test" else 200
                write_tree(root, {f"{split}/{name}/{number:03d}.jpg": Image.fromarray(image)})
    return root


@pytest.mark.slow
def test_evaluate_writes_table_json_and_figures(trained):
    flags = [f"--model_dir={trained}", "--probes=linear,linear_adam,knn,few_labels"]
    done = run("evaluate", *flags, "--baselines=untrained")
    results = json.loads((trained / "evaluation" / "scenes.json").read_text())
    assert (results["step"], results["test_images"]) == (2, 4000)
    assert "--baselines=untrained" in results["command"]
    shown = {
        "learned features (step 2)": results,
        "untrained encoder": results["baselines"]["untrained"],
    }
    for name, found in shown.items():
        line = next(line for line in done.stdout.splitlines() if line.startswith(name))
        for accuracy in (found["linear"]["accuracy"], found["knn"]["accuracy"]):
            assert f"{100 * accuracy:.1f}" in line
        assert "±" in line
    assert np.sum(results["linear"]["confusion"]) == 4000
    assert set(results["knn"]["k"]) == {"1", "5", "20", "200"}
    for name in ("scenes_confusion.png", "scenes_curve.png", "scenes_history.csv"):
        assert (trained / "evaluation" / name).stat().st_size > 0
    assert list((trained / "logs" / "evaluation").glob("events*"))


@pytest.mark.slow
def test_a_second_evaluation_extracts_nothing_and_watching_ends(trained):
    run("evaluate", f"--model_dir={trained}", "--probes=knn")
    kept = {
        path: path.stat().st_mtime_ns
        for path in (trained / "evaluation" / "features").glob("scenes-learned-*/values.npy")
    }
    assert len(kept) == 2
    done = run(
        "evaluate", f"--model_dir={trained}", "--probes=knn", "--baselines=pixels", "--watch"
    )
    results = json.loads((trained / "evaluation" / "scenes.json").read_text())
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("raw pixels"))
    assert line.endswith(f" {100 * results['baselines']['pixels']['knn']['accuracy']:.1f}")
    assert "step 2 is the run's last" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert "learned features" not in done.stderr and "pixels features" in done.stderr


@pytest.mark.slow
def test_transfer_and_a_poisoned_test_split(trained, colours, tmp_path):
    """Other test images change nothing that classifiers learn from, recalibration included."""
    flags = [f"--model_dir={trained}", "--dataset=folder", "--recalibrate_batch_norm=510"]
    flags.append("--max_bad_images=0.1")
    poisoned = _colour_folder(tmp_path / "poisoned", test_shade=0)
    (poisoned / "test" / "red" / "bad.jpg").write_bytes(b"no image")
    features = trained / "evaluation" / "features" / "folder-learned-train" / "values.npy"
    found = []
    for folder in (colours, poisoned):
        done = run("evaluate", *flags, f"--data_dir={folder}")
        results = json.loads((trained / "evaluation" / "folder.json").read_text())
        found.append((results["linear"], features.read_bytes()))
    assert results["classes"] == ["green", "red"] and results["trained_on"] == "scenes"
    (clean, clean_features), (poisoned, poisoned_features) = found
    assert clean["accuracy"] == 1.0 and poisoned["accuracy"] < 1.0
    assert clean_features == poisoned_features
    assert clean["settings"] == poisoned["settings"]
    assert results["recalibrated_on"] == 500
    assert (results["test_images"], results["skipped_images"]) == (16, {"train": 0, "test": 1})
    assert "1 test images cannot be decoded" in done.stderr
    assert "poisoned/test/red/bad.jpg" in done.stderr


@pytest.mark.slow
def test_splits_with_other_classes_are_refused(trained, tmp_path):
    folder = _colour_folder(tmp_path, classes=("green", "blue"))
    flags = [f"--model_dir={trained}", "--dataset=folder", f"--data_dir={folder}"]
    line = run("evaluate", *flags, code=2).stderr.splitlines()[-1]
    assert line.startswith("error: ") and "same classes" in line and "'blue'" in line


def test_watching_waits_and_loads_each_checkpoint_once(tmp_path, monkeypatch):
    config = config_lib.make({"ndf": 4, "n_rkhs": 16, "n_depth": 1, "batch_size": 8, "epochs": 1.0})
    model = checkpoints.build_model(config, 0)
    facts = {"classes": [], "images": 20}  # two whole batches
    config_file.save(config, config_file.path_in(tmp_path), facts)
    steps, loaded, load_model = iter((1, None, 2)), [], checkpoints.load_model

    def train_meanwhile(seconds):
        if step := next(steps):
            checkpoints.Checkpoints(tmp_path, model).save(step)

    def load(*arguments, **options):
        loaded.append(load_model(*arguments, **options))
        return loaded[-1]

    monkeypatch.setattr(evaluation, "time", types.SimpleNamespace(sleep=train_meanwhile))
    monkeypatch.setattr(checkpoints, "load_model", load)
    monkeypatch.setattr(evaluation, "_load_splits", lambda *_: None)  # no images needed
    evaluation.watch(evaluation.EvaluationSettings(str(tmp_path)))
    assert [step for _, step in loaded] == [1, 2]
    history = tmp_path / "evaluation" / "scenes_history.csv"
    assert [row["step"] for row in evaluation_files.read_history(history)] == [1, 2]


def test_the_run_s_own_copy_of_its_policy_is_used(tmp_path):
    config_file.save(
        config_lib.make({"policy": "moved.json"}), config_file.path_in(tmp_path), {"classes": []}
    )
    policies.save(policies.load("randaugment(1,2)"), policies.path_in(tmp_path))
    settings = evaluation.EvaluationSettings(model_dir=str(tmp_path))
    assert evaluation._evaluation_config(settings).views.policy == str(tmp_path / "policy.json")


def test_a_kept_checkpoint_can_be_evaluated_by_its_step(tmp_path, monkeypatch):
    config = config_lib.make({"ndf": 2, "n_rkhs": 8, "n_depth": 1})
    model = checkpoints.build_model(config, 0)
    config_file.save(config, config_file.path_in(tmp_path), {"classes": [], "images": 20})
    kept = checkpoints.Checkpoints(tmp_path, model, kept=3)
    bias = next(v for v in model.encoder.trainable_variables if v.path.endswith("bias"))
    for step in (10, 20, 30):
        bias.assign(np.full(bias.shape, step))
        kept.save(step)
    (tmp_path / "metrics.csv").write_text("step,seconds\n10,3600\n30,10800\n")
    monkeypatch.setattr(evaluation, "_load_splits", lambda *_: None)  # no images needed
    digests = {}
    for step in (20, None):
        results = evaluation.evaluate(evaluation.EvaluationSettings(str(tmp_path), step=step))
        digests[results["step"]] = results["weights_sha256"]
    assert list(digests) == [20, 30] and digests[20] != digests[30]
    history = evaluation_files.read_history(tmp_path / "evaluation" / "scenes_history.csv")
    assert [(row["step"], row["hours"]) for row in history] == [(20, 2.0), (30, 3.0)]
    with pytest.raises(UserError, match=r"--step: expected .*: 10, 20, 30\. Received: 25\."):
        evaluation.evaluate(evaluation.EvaluationSettings(str(tmp_path), step=25))


def test_a_run_without_checkpoint_cannot_be_probed(tmp_path):
    config_file.save(config_lib.Config(), config_file.path_in(tmp_path), {"classes": []})
    assert "expected a checkpoint" in refused("evaluate", f"--model_dir={tmp_path}")


@pytest.mark.parametrize(
    "flags, named",
    [
        ([], "--model_dir"),
        (["--model_dir=NOWHERE"], "config.json"),
        (["--model_dir=NOWHERE", "--probes=forest"], "--probes"),
        (["--model_dir=NOWHERE", "--probes="], "--probes: expected some of"),
        (["--model_dir=NOWHERE", "--probe_epochs=nan"], "--probe_epochs"),
        (["--model_dir=NOWHERE", "--baselines=magic"], "--baselines"),
        (["--model_dir=NOWHERE", "--probe_epochs=2"], "--probe_epochs: expected beside"),
        (["--model_dir=NOWHERE", "--mask_dir=masks"], "--mask_dir: expected beside"),
        (["--model_dir=NOWHERE", "--probes=segmentation", "--baselines=pixels"], "--baselines"),
        (["--model_dir=/dev/null/run", "--watch"], "/dev/null is a file"),
        (["--model_dir=NOWHERE", "--watch", "--step=3"], "--watch: expected without --step"),
    ],
)
def test_mistakes_get_one_line(flags, named, tmp_path):
    flags = [flag.replace("NOWHERE", str(tmp_path / "none")) for flag in flags]
    assert named in refused("evaluate", *flags)
