"""evaluate(model_dir): probes and baselines of a trained model, as a table and as JSON."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from amdim_tf import checkpoints, probing, sources
from amdim_tf import config as config_lib
from amdim_tf.errors import UserError

PROBES = ("linear",)
BASELINES = ("untrained", "pixels")


def evaluate(model_dir, probes: list[str], baselines: list[str]) -> dict[str, Any]:
    """Trains the probes on the training images' features and counts on the test images.

    Args:
        model_dir: directory of a training run.
        probes: among PROBES.
        baselines: among BASELINES; features that the same probes are trained on.

    Returns:
        What is written to MODEL_DIR/evaluation/DATASET.json.
    """
    _check_names("probes", probes, PROBES)
    _check_names("baselines", baselines, BASELINES)
    config, facts = config_lib.load(config_lib.path_in(model_dir))
    classes = len(facts["classes"])
    if classes < 2:
        raise UserError(
            f"{config_lib.path_in(model_dir)}: expected at least 2 classes, for a classifier. "
            f"Received: {classes}. This run learned from images without labels."
        )
    model, step = checkpoints.load_model(model_dir, step_wanted=True)
    train, test = (sources.load(config.data, split) for split in ("labelled", "test"))

    def features_of(name):
        if name == "pixels":
            return [probing.pixel_features(source, config) for source in (train, test)]
        encoder = checkpoints.build_model(config, classes) if name == "untrained" else model
        return [
            probing.encoder_features(encoder, source, config, f"{name} features, {split}")
            for split, source in (("train", train), ("test", test))
        ]

    results: dict[str, Any] = {
        "dataset": config.data.dataset,
        "step": step,
        "train_images": len(train),
        "test_images": len(test),
    }
    linear = {
        name: probing.linear_accuracy(*features_of(name), classes)
        for name in ("learned", *baselines)
    }
    results["linear"] = {"accuracy": linear["learned"]}
    results["baselines"] = {name: {"linear": {"accuracy": linear[name]}} for name in baselines}
    _print_table(linear, results)
    _write(results, pathlib.Path(model_dir) / "evaluation" / f"{config.data.dataset}.json")
    return results


def _check_names(flag: str, names: list[str], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"--{flag}: expected {', '.join(known)}. Received: {name!r}.")


def _print_table(linear: dict[str, float], results: dict[str, Any]) -> None:
    described = {
        "learned": f"learned features (step {results['step']})",
        "untrained": "untrained encoder",
        "pixels": "raw pixels",
    }
    print(f"\nLinear accuracy on {results['test_images']} test images of {results['dataset']}:")
    for name, accuracy in linear.items():
        print(f"  {described[name]:<32} {100 * accuracy:5.1f}%")


def _write(results: dict[str, Any], path: pathlib.Path) -> None:
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps(results, indent=2) + "\n")
    aside.replace(path)
