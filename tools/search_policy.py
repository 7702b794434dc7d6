"""Searches an augmentation policy for one's own data, with a trained run as the judge.

Usage:
    python tools/search_policy.py --model_dir=RUN --output=POLICY.json [--trials=200] [--minutes=30]
    python -m amdim_tf.train … --policy=POLICY.json

RUN has learned from labelled images, so that it has a linear classifier beside the encoder. A good
augmentation makes images that are new, yet look to this classifier like what they are: the density
matching of Fast AutoAugment (arXiv 1905.00397). Nothing is trained, and so a trial costs one pass
of the encoder over a few hundred images.

--images labelled training images are drawn; never test images, since a policy is part of training.
A quarter is kept for the figures at the end; the others are cut into --folds parts, each with a
search of its own. The paper has a network for each fold, trained on images outside it. Here all
folds share the run's classifier, which has seen the images before; they serve to keep the searches,
and with them the sub-policies, different.

A trial is a policy of five sub-policies of two steps (operation, probability, level). Each gets a
fifth of the fold's images; its harm is how much the classifier's loss on them rises. The first
trials are random, the later ones come from a tree-structured Parzen estimator, as in the paper: one
density of the steps of the best sub-policies so far, one of the others', and of some draws from the
first density the one with the highest ratio of the two. The result is merged from the best of each
fold, with each pair of operations once.

To do nothing harms nothing, so that density matching alone drifts towards no augmentation, or
towards the one operation that the classifier minds least. Hence:

- There is no identity among the operations; a probability is at least 0.2, and a level at least a
  quarter of the operation's range away from where it changes nothing.
- An image that comes out as it went in (less than a grey level away, on average) does not count, so
  that rarely doing something is no merit.
- A sub-policy that leaves more than half of its images like that is out, whatever the reason: steps
  that undo each other (invert twice), or that do nothing to such data (color on grey images).
- No operation is in more than a third (rounded up) of the best sub-policies.

The code of the paper's authors counts an image as recognised if it is in any of five draws. That
rewards variety, but lets a harmful sub-policy hide behind its neighbours; here each has its own
images.

The same seed, data and number of trials give the same file, on the same machine.
"""

import dataclasses
import itertools
import math
import os
import pathlib
import shlex
import sys
import time
import typing
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
from absl import flags

from amdim_tf import cli_flags, config_file
from amdim_tf import config as config_lib
from amdim_tf import policy_tables as tables
from amdim_tf.errors import Interrupted, UserError
from amdim_tf.policy_search import (
    OPERATIONS,
    TRIAL_SIZE,
    Score,
    SubPolicy,
    Trial,
    draw_random,
    merge,
    search,
)
from amdim_tf.policy_tables import Policy, Step
from amdim_tf.progress import Progress
from amdim_tf.signals import StopSignals

NOTICEABLE = 1.0  # mean change of an image, in grey levels
LEAST_CHANGED = 0.5  # share of the images that a sub-policy changes
_LEAST_IMAGES = 10 * TRIAL_SIZE  # in a fold
_SEARCHED = 0.75  # share of the images; the others are for the figures at the end
_BATCH = 250
_UNCHANGED = Policy(((Step("identity", 0.0, 0.0),) * 2,))
# Keys that keep the random draws apart.
_IMAGES_KEY, _ORDER_KEY, _COMPARISON_KEY = 1, 3, 4  # 2 is the search's


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long and how widely to search; each is a flag of the same name."""

    trials: int = 200
    minutes: float = 0.0
    images: int = 4000
    folds: int = 5
    sub_policies: int = 25
    seed: int = 0


def define_flags() -> None:
    """In a function, so that the module can be imported beside other programs' flags."""
    flags.DEFINE(
        cli_flags.PATH, "model_dir", None, "Directory of a training run on labelled images."
    )
    flags.DEFINE(cli_flags.PATH, "output", None, "Policy file to write; ends in .json.")
    flags.DEFINE(
        cli_flags.PATH, "data_dir", None, "Where the run's data set is now, if it has moved."
    )
    flags.DEFINE(
        cli_flags.Finite(0.0), "minutes", Settings.minutes, "Most time for the trials; 0: no limit."
    )
    for name, low, high, text in (
        ("trials", 0, 10**9, "Most trials, in all folds; 0: no limit."),
        ("images", 1, 10**6, "Labelled training images to judge by."),
        ("folds", 1, 1000, "Searches, each on images of its own."),
        ("sub_policies", 1, len(OPERATIONS) ** 2, "Sub-policies of the result."),
        ("seed", 0, 2**31 - 1, "Seed of images and trials."),
    ):
        default = getattr(Settings, name)
        flags.DEFINE_integer(name, default, text, lower_bound=low, upper_bound=high)


def run_trials(
    trials: Iterator[Trial], most: int, minutes: float, signals: StopSignals
) -> list[Trial]:
    """Takes trials until a limit is reached, and at least one.

    Args:
        trials: from `search`.
        most: how many; 0 for no limit.
        minutes: for how long; 0 for no limit.
        signals: looked at after each trial.

    Raises:
        Interrupted: after a signal.
    """
    done: list[Trial] = []
    began, shown = time.monotonic(), 0
    limit = 60 * minutes or math.inf
    total, unit = (most, "trial") if most else (math.ceil(limit), "second")
    with Progress(total, "search", unit) as progress:
        for trial in itertools.islice(trials, most or None):
            done.append(trial)
            seconds = time.monotonic() - began
            best = 100 * max(trial.accuracy for trial in done)
            progress.show(f"best accuracy {best:.1f}% {seconds / len(done):.2f} s per trial")
            reached = len(done) if most else min(int(seconds), total)
            progress.advance(reached - shown)
            shown = reached
            if seconds >= limit:
                break
            if signals.received and len(done) != most:
                raise Interrupted(
                    f"Stopped by {signals.received} after {len(done)} trials; nothing is written. "
                    "For a shorter search, use --trials or --minutes."
                )
    return done


class Verdict(typing.NamedTuple):
    """What the classifier makes of images, and whether these have changed."""

    losses: np.ndarray  # [N]
    correct: np.ndarray  # bool [N]
    changed: np.ndarray  # bool [N]


def make_judge(model, images: np.ndarray, labels: np.ndarray):
    """A run's encoder and linear classifier as a judge of augmented images.

    Args:
        model: of a run with classes.
        images: uint8 [N, S, S, 3].
        labels: int32 [N].

    Returns:
        A function (rows [n], policies, key) -> Verdict of n images: np.array_split cuts the rows
        into as many parts as there are policies. Draws are a function of the key, two numbers.
    """
    import tensorflow as tf

    from amdim_tf import policies, views
    from amdim_tf.classifiers import LOGIT_CLIP

    @tf.function(reduce_retracing=True)
    def judge_batch(images, labels, drawn):
        before = tf.cast(images, tf.float32)  # [b, S, S, 3]
        after = policies.apply(before, drawn)  # before normalization, as views.finish_view does
        normalized = views.normalize(model.view_settings, after)
        logits = model.linear(model.encoder(normalized, training=False)["f1"])  # [b, classes]
        clipped = LOGIT_CLIP * tf.tanh(logits / LOGIT_CLIP)
        return Verdict(
            losses=tf.nn.sparse_softmax_cross_entropy_with_logits(labels, clipped),
            correct=tf.argmax(logits, -1, output_type=labels.dtype) == labels,
            changed=tf.reduce_mean(tf.abs(after - before), axis=[1, 2, 3]) >= NOTICEABLE,
        )

    def judge(rows: np.ndarray, candidates: list[Policy], key) -> Verdict:
        draws = [
            policies.draw(policy, tf.random.experimental.stateless_fold_in(key, number), len(part))
            for number, (policy, part) in enumerate(
                zip(candidates, np.array_split(rows, len(candidates)), strict=True)
            )
        ]
        drawn = [tf.concat(values, axis=0) for values in zip(*draws, strict=True)]
        verdicts = []
        for start in range(0, len(rows), _BATCH):
            batch = slice(start, start + _BATCH)
            steps = policies.DrawnSteps(*(values[batch] for values in drawn))
            verdicts.append(judge_batch(images[rows[batch]], labels[rows[batch]], steps))
        return Verdict(*map(np.concatenate, zip(*verdicts, strict=True)))

    return judge


def make_score(judge, folds: list[np.ndarray], seed: int) -> Score:
    """The score that `search` wants: the mean rise of the loss on the images that have changed.

    Args:
        judge: from `make_judge`.
        folds: rows of the images of each fold.
        seed: of which image gets which sub-policy, and of what its steps do.
    """
    plain = [judge(rows, [_UNCHANGED], [seed, 0]).losses for rows in folds]
    if not np.isfinite(np.concatenate(plain)).all():
        raise UserError(
            "--model_dir: expected a classifier with finite losses. Received: a run that has "
            "diverged. Choose another."
        )

    def score(fold: int, number: int, sub_policies: list[SubPolicy]):
        order = np.random.default_rng([_ORDER_KEY, seed, number]).permutation(len(folds[fold]))
        candidates = [Policy((sub_policy,)) for sub_policy in sub_policies]
        verdict = judge(folds[fold][order], candidates, [seed, 1 + number])
        rises = verdict.losses - plain[fold][order]  # [n]
        harms = []
        for part in np.array_split(np.arange(len(order)), len(sub_policies)):
            changed = part[verdict.changed[part]]
            enough = len(changed) >= LEAST_CHANGED * len(part)
            # Rounded, since the last digits of sums over threads may differ.
            harms.append(round(float(rises[changed].mean()), 4) if enough else math.inf)
        return harms, float(verdict.correct.mean())

    return score


def load_images(config: config_lib.Config, classes: list[str], count: int, seed: int):
    """Random labelled images in the evaluation view, before normalization.

    Returns:
        (images uint8 [N, S, S, 3], labels int32 [N]); N is below `count` where there are fewer.
    """
    from amdim_tf import input_pipeline, sources, views
    from amdim_tf.examples import subset

    source = sources.load(config.data, "labelled")
    if list(source.class_names) != classes:
        raise UserError(
            f"--data_dir: expected the {len(classes)} classes of the run, {tables.shown(classes)}. "
            f"Received: {config.data.data_dir} with {tables.shown(list(source.class_names))}."
        )
    order = np.random.default_rng([_IMAGES_KEY, seed]).permutation(len(source))
    chosen = subset(source, order[:count])
    images, labels = [], []
    with Progress(len(chosen), "reading images", "image") as progress:
        for normalized, numbers in input_pipeline.evaluation_batches(chosen, config, _BATCH):
            images.append(views.denormalize(config.views, normalized).numpy())
            labels.append(numbers.numpy())
            progress.advance(len(numbers))
    chosen.skipped.check()
    return np.concatenate(images), np.concatenate(labels)


def print_comparison(judge, rows: np.ndarray, found: Policy, seed: int) -> None:
    """Accuracy on images that no search has seen, beside that under a random policy."""
    rng = np.random.default_rng([_COMPARISON_KEY, seed])
    random_policy = Policy(tuple(draw_random(rng, len(found.sub_policies))))
    print(f"\nThe linear classifier on {len(rows)} training images that the search did not use:")
    for name, policy in (
        ("unaugmented", _UNCHANGED),
        ("found policy", found),
        ("random policy", random_policy),
    ):
        verdict = judge(np.tile(rows, 4), [policy], [seed, 0])  # four draws for each image
        accuracy, changed = 100 * verdict.correct.mean(), 100 * verdict.changed.mean()
        print(f"  {name:<16} {accuracy:5.1f}% correct, {changed:5.1f}% of the images changed")


def _least_images(folds: int) -> int:
    return math.ceil(_LEAST_IMAGES * folds / _SEARCHED)


def check(settings: Settings) -> None:
    """Refuses numbers that contradict each other."""
    if not settings.trials and not 0 < settings.minutes < math.inf:
        raise UserError(
            "--trials, --minutes: expected a number above 0 for one of them. "
            f"Received: {settings.trials} and {settings.minutes:g}."
        )
    most = TRIAL_SIZE * settings.trials
    if settings.trials and settings.sub_policies > most:
        raise UserError(
            f"--sub_policies: expected at most {most}, as many as --trials={settings.trials} "
            f"tries. Received: {settings.sub_policies}. Raise --trials."
        )
    least = _least_images(settings.folds)
    if settings.images < least:
        raise UserError(
            f"--images: expected at least {least} for --folds={settings.folds}. "
            f"Received: {settings.images}."
        )


def check_output(output: str) -> None:
    """Refuses, before any work, a path that could not be written after it."""
    path = pathlib.Path(output)
    if path.suffix != ".json" or path.is_dir():
        raise UserError(f"--output: expected a file that ends in .json. Received: {path}.")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(
            "--output: expected a file in a directory that is there and can be written. "
            f"Received: {path}."
        )


def load_run(model_dir: str, data_dir: str | None) -> tuple[config_lib.Config, list[str]]:
    """Settings and class names of a run that has a classifier."""
    config, facts = config_file.load(config_file.path_in(model_dir))
    if len(facts["classes"]) < 2:
        raise UserError(
            f"{config_file.path_in(model_dir)}: expected at least 2 classes, for a classifier. "
            f"Received: {len(facts['classes'])}. This run learned from images without labels."
        )
    if data_dir:
        config = config_lib.update(config, {"data_dir": data_dir})
    return config, facts["classes"]


def find_policy(
    model_dir: str, config: config_lib.Config, classes: list[str], settings: Settings, output: str
) -> None:
    """Searches, writes the policy, and prints what it is worth.

    Args:
        model_dir: directory of the run.
        config, classes: from `load_run`.
        settings: of the search.
        output: the file to write.
    """
    from amdim_tf import checkpoints

    model = checkpoints.load_model(model_dir)
    with StopSignals() as signals:
        images, labels = load_images(config, classes, settings.images, settings.seed)
        least = _least_images(settings.folds)
        if len(images) < least:
            raise UserError(
                f"--folds={settings.folds}: expected at least {least} labelled training images. "
                f"Received: {len(images)}. Choose fewer folds, or label more images."
            )
        judge = make_judge(model, images, labels)
        searched, unseen = np.split(np.arange(len(images)), [math.ceil(_SEARCHED * len(images))])
        score = make_score(judge, np.array_split(searched, settings.folds), settings.seed)
        began = time.monotonic()
        proposed = search(score, settings.folds, settings.seed)
        trials = run_trials(proposed, settings.trials, settings.minutes, signals)
    pace = (time.monotonic() - began) / len(trials)
    found = merge(trials, settings.sub_policies)
    tables.save(found, output)
    print_comparison(judge, unseen, found, settings.seed)
    count = len(found.sub_policies)
    print(f"{output}: written, sub-policies: {count}, from {len(trials)} trials of {pace:.2f} s.")
    if count < settings.sub_policies:
        print(f"--sub_policies={settings.sub_policies} needs more trials.")
    print(f"Use it in a new run: python -m amdim_tf.train … --policy={shlex.quote(output)}")


def main() -> None:
    """Reads and checks the flags, and searches."""
    model_dir = cli_flags.require_model_dir("the directory of a training run")
    output = cli_flags.require("output", "the policy file to write")
    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: cli_flags.FLAGS[name].value for name in names})
    check(settings)
    check_output(output)
    config, classes = load_run(model_dir, cli_flags.FLAGS.data_dir)
    cli_flags.import_tensorflow_quietly()
    find_policy(model_dir, config, classes, settings, output)


if __name__ == "__main__":
    define_flags()
    cli_flags.run(main)
