"""evaluate(settings): probes and baselines of a trained model, as a table, JSON and figures."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import time
from typing import Any

from amdim_tf import (
    augmented_probes,
    checkpoint_files,
    checkpoints,
    config_file,
    evaluation_files,
    feature_splits,
    features,
    few_labels,
    linear_adam,
    masked_images,
    neighbours,
    policies,
    probing,
    recalibration,
    segmentation_probe,
    sources,
    summaries,
)
from amdim_tf import config as config_lib
from amdim_tf.config import Config
from amdim_tf.errors import UserError, warn
from amdim_tf.examples import Source
from amdim_tf.feature_splits import Features
from amdim_tf.model import AMDIM

# Those that classify images, by their features; and how a mixture divides them.
CLASSIFYING = ("linear", "mlp", "knn", "few_labels", "linear_adam", "bag_of_features")
PROBES = (*CLASSIFYING, "segmentation")
BASELINES = ("untrained", "pixels")
# The number of neighbours whose accuracy stands for the whole of kNN.
SHOWN_NEIGHBOURS = 20
_WATCH_SECONDS = 10.0
_MOST_EPOCHS = 100_000


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """What to evaluate, and how.

    Attributes:
        model_dir: directory of a training run.
        dataset, data_dir: what to evaluate on; empty for the run's own.
        mask_dir: masks of a folder's test images, for segmentation.
        max_bad_images: share of images that may be undecodable; None for the run's own.
        probes: among PROBES.
        baselines: among BASELINES; the same probes on these features.
        augmented: train linear and mlp on augmented images, as in the paper.
        probe_epochs: of augmented training; 0: the reference's number for the data set.
        recalibrate: training images whose batch-norm statistics replace the running ones; 0: none.
        seed: of held-out images, draws, classifiers, and of the images to recalibrate on.
        step: of the checkpoint to evaluate; None for the newest.
        command: the command line, for the record.
    """

    model_dir: str
    dataset: str = ""
    data_dir: str = ""
    mask_dir: str = ""
    max_bad_images: float | None = None
    probes: tuple[str, ...] = ("linear",)
    baselines: tuple[str, ...] = ()
    augmented: bool = False
    probe_epochs: float = 0.0
    recalibrate: int = 0
    seed: int = 0
    step: int | None = None
    command: str = ""

    def __post_init__(self):
        """Refuses names that do not exist."""
        for flag, names, known in (
            ("probes", self.probes, PROBES),
            ("baselines", self.baselines, BASELINES),
        ):
            for name in names:
                if name not in known:
                    raise UserError(f"--{flag}: expected {', '.join(known)}. Received: {name!r}.")
        if not self.probes:
            raise UserError(f"--probes: expected some of {', '.join(PROBES)}. Received: nothing.")
        if not 0 <= self.probe_epochs <= _MOST_EPOCHS:  # NaN is not
            raise UserError(
                f"--probe_epochs: expected 0 to {_MOST_EPOCHS}. Received: {self.probe_epochs}."
            )
        classifying = set(self.probes) & set(CLASSIFYING)
        for flag, given, wanted, needs in (
            ("probe_epochs", self.probe_epochs, self.augmented, "--probe_training=augmented"),
            ("mask_dir", self.mask_dir, "segmentation" in self.probes, "--probes=segmentation"),
            ("baselines", ",".join(self.baselines), classifying, "a probe that classifies"),
        ):
            if given and not wanted:
                raise UserError(f"--{flag}: expected beside {needs} only. Received: {given}.")


@dataclasses.dataclass(frozen=True)
class _Splits:
    """The images that classifiers learn from and those that they are counted on."""

    train: Source
    test: Source

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.train.class_names


def evaluate(settings: EvaluationSettings) -> dict[str, Any]:
    """Evaluates a checkpoint of a run.

    Returns:
        What is written to MODEL_DIR/evaluation/DATASET.json, without what stays of earlier
        evaluations.
    """
    config = _evaluation_config(settings)
    model, step = checkpoints.load_model(settings.model_dir, True, settings.step)
    splits = _load_splits(settings, config)
    return _evaluate_step(settings, config, splits, model, step)


def wait_for_run(model_dir: str) -> None:
    """Returns when a training has written its settings."""
    path = config_file.path_in(model_dir)
    directory = pathlib.Path(model_dir)
    while not directory.exists():
        directory = directory.parent
    if not directory.is_dir():
        raise UserError(
            f"--model_dir: expected a directory. Received: {model_dir}, in which no run can appear "
            f"while {directory} is a file."
        )
    if not path.exists():
        print(f"{path}: no run yet; waiting for one.")
    while not path.exists():
        time.sleep(1)


def watch(settings: EvaluationSettings) -> None:
    """Evaluates the newest checkpoint of a training until the run has reached its last step."""
    config = _evaluation_config(settings)
    splits = _load_splits(settings, config)
    directory = config_file.checkpoints_in(settings.model_dir)
    evaluated = looked_at = -1
    if not checkpoint_files.steps_in(directory):
        print(f"{directory}: no checkpoint yet; waiting for the first.")
    while evaluated < _last_step(settings.model_dir):
        newest = max(checkpoint_files.steps_in(directory), default=-1)
        if newest > evaluated and newest != looked_at:
            model, step = checkpoints.load_model(settings.model_dir, step_wanted=True)
            if step > evaluated:  # an older one is loaded where the newest is damaged
                _evaluate_step(settings, config, splits, model, step)
                evaluated = step
        else:
            time.sleep(_WATCH_SECONDS)
        looked_at = newest
    print(f"{settings.model_dir}: step {evaluated} is the run's last; nothing more to watch.")


def _last_step(model_dir) -> float:
    """The step at which the training of a run ends; infinite before it has begun."""
    config, facts = config_file.load(config_file.path_in(model_dir))
    training, images = config.training, facts.get("images")
    if training.train_steps or not isinstance(images, int):
        return training.train_steps or math.inf
    return training.total_steps(images)


def _evaluation_config(settings: EvaluationSettings) -> Config:
    """The run's settings, with the data set to evaluate on and the encoder's preprocessing."""
    config, _ = config_file.load(config_file.path_in(settings.model_dir))
    dataset = settings.dataset or config.data.dataset
    own = dataset == config.data.dataset
    data_dir = settings.data_dir or (config.data.data_dir if own else "")
    policy = policies.of_run(config.views.policy, settings.model_dir)
    changed = {"dataset": dataset, "data_dir": data_dir, "policy": policy}
    if settings.max_bad_images is not None:
        changed["max_bad_images"] = settings.max_bad_images
    return config_lib.update(config, changed)


def _load_splits(settings, config: Config) -> _Splits | None:
    """Labelled images; None where no probe needs any."""
    if not set(settings.probes) & set(CLASSIFYING):
        return None
    splits = _Splits(*(sources.load(config.data, split) for split in ("labelled", "test")))
    names, others = splits.train.class_names, splits.test.class_names
    if len(names) < 2:
        raise UserError(
            f"--dataset={config.data.dataset}: expected labelled training images of at least 2 "
            f"classes, for a classifier. Received: {len(names)} classes."
        )
    if tuple(names) != tuple(others):
        different = sorted(set(names) ^ set(others))
        having = "training" if different[0] in names else "test"
        raise UserError(
            f"--dataset={config.data.dataset}: expected the same classes in the training and the "
            f"test split. Received: {len(different)} that only one has, such as {different[0]!r} "
            f"among the {having} images alone. Add images of it to the other, or remove it."
        )
    return splits


def _evaluate_step(settings, config: Config, splits: _Splits | None, model: AMDIM, step: int):
    """Evaluates one checkpoint and writes the results."""
    if model.mixture is None:
        for probe in {"bag_of_features", "segmentation"} & set(settings.probes):
            segmentation_probe.require_mixture(model, f"--probes={probe}")
    if "segmentation" in settings.probes:
        masked_images.count(config, settings.mask_dir)  # masks that are not there, before the work
    recalibrated_on = 0
    if settings.recalibrate:
        train = splits.train if splits else sources.load(config.data, "train")
        recalibrated_on = recalibration.recalibrate(
            model, train, config, settings.recalibrate, settings.seed
        )
    results: dict[str, Any] = {
        "dataset": config.data.dataset,
        "data_dir": os.path.abspath(config.data.data_dir) if config.data.data_dir else "",
        "trained_on": config_file.load(config_file.path_in(settings.model_dir))[0].data.dataset,
        "step": step,
        "training_hours": summaries.training_hours(settings.model_dir, step),
        "weights_sha256": features.weights_digest(model),
        "seed": settings.seed,
        "probe_training": "augmented" if settings.augmented else "cached",
        "probe_epochs": settings.probe_epochs,
        "recalibrated_on": recalibrated_on,
        "classes": list(splits.class_names) if splits else [],
        "command": settings.command,
        "baselines": {},
    }
    if "segmentation" in settings.probes:  # first: a bad mask shows before classifiers are trained
        results["segmentation"] = segmentation_probe.evaluate(
            model, config, settings.mask_dir, settings.seed
        )
        results["images_sha256"] = ["", _key_of(sources.load(config.data, "test"), config)]
    if splits:
        results |= _classify(settings, config, splits, model)
    evaluation_files.print_table(results)
    evaluation_files.write(settings.model_dir, results)
    return results


def _classify(settings, config: Config, splits: _Splits, model: AMDIM) -> dict[str, Any]:
    """Results of the classifying probes, those of the baselines under "baselines"."""
    results: dict[str, Any] = {}
    for name in ("learned", *settings.baselines):
        encoder = model
        if name == "untrained":
            encoder = checkpoints.build_model(config, model.classes)
            if settings.recalibrate:
                recalibration.recalibrate(
                    encoder, splits.train, config, settings.recalibrate, settings.seed
                )
        train, test = (
            _features_of(name, encoder, source, config, settings.model_dir, split)
            for split, source in (("train", splits.train), ("test", splits.test))
        )
        feature_splits.check(train, test, splits.class_names)
        found = _probe(settings, config, name, encoder, splits, train, test)
        if name == "learned":
            results |= {"train_images": len(train.labels), "test_images": len(test.labels)}
            results["skipped_images"] = _skipped(splits, train, test)
            results["images_sha256"] = [
                _key_of(source, config) for source in (splits.train, splits.test)
            ]
            results |= {**found, "baselines": {}}
        else:
            results["baselines"][name] = found
    return results


def _key_of(source: Source, config: Config) -> str:
    """What tells the images of a split, as they are evaluated, from others."""
    return features.features_key("", source, config)


def _skipped(splits: _Splits, train: Features, test: Features) -> dict[str, int]:
    """How many images of each split could not be decoded; a warning where there are any."""
    skipped = {}
    for split, source, found in (("train", splits.train, train), ("test", splits.test, test)):
        names = source.skipped.names
        # Images in memory were left out when they were read, others when features were extracted.
        skipped[split] = max(len(source) - len(found.labels), len(names))
        if skipped[split]:
            first = f", the first being {names[0]}" if names else ""
            warn(f"{skipped[split]} {split} images cannot be decoded and do not count{first}.")
    return skipped


def _features_of(name, encoder: AMDIM, source: Source, config, model_dir, split: str) -> Features:
    """Features of a split, extracted or from the cache."""
    if name == "pixels":
        function, weights = features.pixels_of, f"{features.PIXELS_SIDE}x{features.PIXELS_SIDE}"
    else:
        function, weights = features.f1_of(encoder), features.weights_digest(encoder)
    directory = pathlib.Path(model_dir) / "evaluation" / "features"
    return features.cached_features(
        directory / f"{config.data.dataset}-{name}-{split}",
        features.features_key(weights, source, config),
        function,
        source,
        config,
        f"{name} features, {split}",
    )


def _probe(settings, config, name, encoder, splits: _Splits, train: Features, test: Features):
    """{probe: results} for one set of features."""
    classes, seed = len(splits.class_names), settings.seed
    found: dict[str, Any] = {}
    augmented = settings.augmented and name != "pixels"
    if augmented:
        wanted = [probe for probe in augmented_probes.PROBES if probe in settings.probes]
        if wanted:
            found |= augmented_probes.evaluate(
                encoder, splits.train, test, config, wanted, settings.probe_epochs, seed
            )
    for probe, fit in (("linear", probing.fit_linear), ("mlp", probing.fit_mlp)):
        if probe in settings.probes and not augmented:
            fitted = fit(train, classes, seed, f"{probe} classifier, {name}")
            measured = probing.measure(fitted.logits(test.values), test.labels, classes)
            found[probe] = {**measured, "settings": fitted.settings}
    if {"bag_of_features", "linear"} & set(settings.probes) and name == "learned":
        found |= _bag_of_features(encoder, train, test, classes, seed)
    if "linear_adam" in settings.probes:
        found["linear_adam"] = {"accuracy": linear_adam.linear_accuracy(train, test, classes)}
    if "knn" in settings.probes:
        by_number = neighbours.evaluate(train, test, splits.class_names)
        shown = by_number[SHOWN_NEIGHBOURS]
        found["knn"] = {**shown, "k": {str(k): value for k, value in by_number.items()}}
    if "few_labels" in settings.probes:
        found["few_labels"] = few_labels.evaluate(train, test, splits.class_names, seed=seed)
    return found


def _bag_of_features(model: AMDIM, train: Features, test: Features, classes: int, seed: int):
    """A linear classifier on a mixture's components (end of the paper's section 4); or nothing.

    The paper does not say how its bag is made. Here it is the mean and the maximum over the
    components, which do not depend on their order: [N, 2D] of f1 [N, D].
    """
    if model.mixture is None:
        return {}
    bags = [
        Features(features.bag_of_features(model, split.values), split.labels)
        for split in (train, test)
    ]
    fitted = probing.fit_linear(bags[0], classes, seed, "linear classifier, bag of features")
    measured = probing.measure(fitted.logits(bags[1].values), test.labels, classes)
    return {"bag_of_features": {**measured, "settings": fitted.settings}}
