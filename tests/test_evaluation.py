"""The linear probe and the evaluation program."""

import json

import numpy as np
import pytest
from test_train import TINY, refused, run

from amdim_tf import config as config_lib
from amdim_tf.probing import Features, linear_accuracy


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


@pytest.mark.slow
def test_evaluate_writes_table_and_json(tmp_path):
    model_dir = tmp_path / "run"
    run("train", f"--model_dir={model_dir}", *TINY, "--train_steps=2")
    done = run("evaluate", f"--model_dir={model_dir}", "--baselines=untrained,pixels")
    results = json.loads((model_dir / "evaluation" / "scenes.json").read_text())
    assert (results["step"], results["test_images"]) == (2, 4000)
    shown = {
        "learned features (step 2)": results["linear"]["accuracy"],
        "untrained encoder": results["baselines"]["untrained"]["linear"]["accuracy"],
        "raw pixels": results["baselines"]["pixels"]["linear"]["accuracy"],
    }
    for name, accuracy in shown.items():
        line = next(line for line in done.stdout.splitlines() if name in line)
        assert f"{100 * accuracy:.1f}%" in line


def test_a_run_without_classes_cannot_be_probed(tmp_path):
    config_lib.save(config_lib.Config(), config_lib.path_in(tmp_path), {"classes": []})
    assert "at least 2 classes" in refused("evaluate", f"--model_dir={tmp_path}")


@pytest.mark.parametrize(
    "flags, named",
    [
        ([], "--model_dir"),
        (["--model_dir=NOWHERE"], "config.json"),
        (["--model_dir=NOWHERE", "--probes=forest"], "--probes"),
        (["--model_dir=NOWHERE", "--baselines=magic"], "--baselines"),
    ],
)
def test_mistakes_get_one_line(flags, named, tmp_path):
    flags = [flag.replace("NOWHERE", str(tmp_path / "none")) for flag in flags]
    assert named in refused("evaluate", *flags)
