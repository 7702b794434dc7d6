"""tools/search_policy.py: the search with made-up and with real scores, and the program."""

import collections
import dataclasses
import itertools
import math
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from pictures import encoded, picture, write_tree
from PIL import Image

from amdim_tf import checkpoints, config_file, policies, policy_search, training_loop, views
from amdim_tf import config as config_lib
from amdim_tf.errors import Interrupted, UserError
from amdim_tf.policy_search import OPERATIONS, StepDensity, Trial
from amdim_tf.policy_tables import RANGES, Policy, Step
from amdim_tf.signals import StopSignals

TOOL = pathlib.Path(__file__).resolve().parents[1] / "tools" / "search_policy.py"
sys.path.append(str(TOOL.parent))
import search_policy as tool  # noqa: E402

PICTURES = 150
SMALL = tool.Settings(trials=12, images=140, folds=2, sub_policies=6)
HARMFUL = ("invert", "solarize", "rotate", "shear_x", "shear_y")


def _tinted(number):
    """A small picture, reddish or, if the number is odd, greenish."""
    tint = [0.4, 1.0, 0.4] if number % 2 else [1.0, 0.4, 0.4]
    pixels = np.asarray(picture(32, 32, number)) * np.array(tint)
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A directory with pictures in data/ and a tiny run on them in run/."""
    root = tmp_path_factory.mktemp("search")
    names = {f"train/{'rg'[i % 2]}/{i:03d}.png": _tinted(i) for i in range(PICTURES)}
    write_tree(root / "data", {name: encoded(image, "PNG") for name, image in names.items()})
    settings = {
        "dataset": "folder", "data_dir": str(root / "data"), "image_size": 32, "ndf": 4,
        "n_rkhs": 16, "n_depth": 1, "batch_size": 8, "train_steps": 3, "augmentation": "none",
        "evaluation_resize": 32,
    }  # fmt: skip
    training_loop.train(config_lib.make(settings), root / "run")
    return root


@pytest.fixture(scope="module")
def loaded(run):
    """(model, images, labels) of the run; the classifier is fitted to red and green."""
    config, classes = tool.load_run(str(run / "run"), None)
    model = checkpoints.load_model(run / "run")
    images, labels = tool.load_images(config, classes, PICTURES, seed=0)
    f1 = model.encode(model.preprocess(images))["f1"].numpy()
    inputs = np.concatenate([f1, np.ones([len(f1), 1])], axis=1)
    penalty = 1e-3 * np.eye(inputs.shape[1])
    wanted = 6.0 * np.eye(2)[labels] - 3.0
    weights = np.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ wanted)
    model.linear.dense.set_weights([weights[:-1], weights[-1]])
    return model, images, labels


@pytest.fixture(scope="module")
def judge(loaded):
    """The fitted classifier as a judge of the run's images, and of the same images in grey."""
    model, images, labels = loaded
    grey = np.repeat(images.mean(axis=3, keepdims=True).astype(np.uint8), 3, axis=3)
    return tool.make_judge(model, np.concatenate([images, grey]), np.tile(labels, 2))


def _made_up_harm(sub_policy):
    return sum(
        step.probability * policy_search.strength(step.operation, step.level)
        for step in sub_policy
        if step.operation in HARMFUL
    )


def _made_up_score(fold, number, sub_policies):
    """Some operations do harm, as much as probability and strength say; noise hides it in part."""
    noise = 0.2 * np.random.default_rng(number).standard_normal(len(sub_policies))
    return [_made_up_harm(each) + error for each, error in zip(sub_policies, noise, strict=True)], 0


def _trials(score, count, folds=2, seed=0):
    return list(itertools.islice(policy_search.search(score, folds, seed), count))


def _mean_harm(sub_policies):
    return np.mean([_made_up_harm(sub_policy) for sub_policy in sub_policies])


@pytest.mark.parametrize("seed", range(3))
def test_finds_what_is_harmless(seed):
    trials = _trials(_made_up_score, 100, seed=seed)
    rng = np.random.default_rng(seed)
    random = _mean_harm(policy_search.draw_random(rng, 2000))
    late = _mean_harm(itertools.chain.from_iterable(trial.sub_policies for trial in trials[-20:]))
    assert late < 0.4 * random  # random search would stay where it is
    # The best of as many random sub-policies, by the same noisy score, are worse, too.
    blind = [
        Trial(number % 2, drawn, *_made_up_score(number % 2, number, drawn))
        for number, drawn in ((number, policy_search.draw_random(rng, 5)) for number in range(100))
    ]
    found, best_of_random = (policy_search.merge(each, 25).sub_policies for each in (trials, blind))
    assert len(found) == len(best_of_random) == 25
    assert _mean_harm(found) < min(0.1 * random, _mean_harm(best_of_random))


def test_trials_are_a_function_of_seed_and_number():
    assert _trials(_made_up_score, 30)[:20] == _trials(_made_up_score, 20)
    assert _trials(_made_up_score, 20, seed=1) != _trials(_made_up_score, 20)


def test_folds_search_on_their_own():
    disliked = ("posterize", "cutout")

    def score(fold, number, sub_policies):
        return [
            float(sum(step.operation == disliked[fold] for step in sub_policy))
            for sub_policy in sub_policies
        ], 0

    uses = [collections.Counter(), collections.Counter()]
    for trial in _trials(score, 120)[40:]:
        uses[trial.fold].update(step.operation for each in trial.sub_policies for step in each)
    for fold in range(2):
        assert uses[fold][disliked[fold]] < 0.5 * uses[1 - fold][disliked[fold]]


def test_steps_stay_inside_the_space():
    rng = np.random.default_rng(0)
    corners = [Step(name, 0.2, level) for name in OPERATIONS for level in (0.0, 1.0)]
    drawn = [StepDensity(corners).draw(rng) for _ in range(2000)]
    assert {step.operation for step in drawn} == set(OPERATIONS)
    assert "identity" not in OPERATIONS
    for step in drawn:
        assert policy_search.LEAST_PROBABILITY <= step.probability <= 1 and 0 <= step.level <= 1
        assert policy_search.strength(step.operation, step.level) >= policy_search.LEAST_STRENGTH
        assert step.level == 0 or step.operation in RANGES


@pytest.mark.parametrize("operation", RANGES)
def test_strength_is_the_distance_from_no_change(operation):
    image = np.random.default_rng(0).integers(0, 256, [1, 32, 32, 3]).astype(np.float32)

    def change(level):
        step = Step(operation, 1.0, level)
        drawn = policies.draw(Policy(((step,),)), [0, 0], 1)
        return np.abs(policies.apply(image, drawn) - image).mean()

    for level in (0.0, 0.5, 1.0):
        assert (change(level) == 0) == (policy_search.strength(operation, level) == 0)


def test_density_by_hand():
    observed = [Step("invert", 0.5, 0.0), Step("rotate", 0.4, 0.7), Step("rotate", 0.9, 0.7)]
    density = StepDensity(observed)
    peak = 1 / (0.15 * math.sqrt(2 * math.pi))
    for step, kernels in (
        (Step("invert", 0.5, 0.0), peak),
        (Step("invert", 0.65, 0.0), peak * math.exp(-0.5)),
        (Step("rotate", 0.4, 0.85), peak**2 * (math.exp(-0.5) + math.exp(-0.5 * (100 / 9 + 1)))),
        (Step("color", 0.5, 0.0), 0.0),
    ):
        assert density.log_density(step) == pytest.approx(math.log((1 + kernels) / 18))


def _pair(first, second="cutout", probability=0.5):
    return Step(first, probability, 0.9), Step(second, probability, 0.9)


def test_select_takes_pairs_once_and_no_operation_too_often():
    rng = np.random.default_rng(0)
    sharp = [(Step("sharpness", 0.9, 0.0), step) for step, _ in policy_search.draw_random(rng, 100)]
    selected = policy_search.select(sharp + policy_search.draw_random(rng, 400), 12)
    pairs = [tuple(step.operation for step in sub_policy) for sub_policy in selected]
    assert len(pairs) == len(set(pairs)) == 12
    assert sum("sharpness" in pair for pair in pairs) == 4
    assert selected[0] == sharp[0]
    assert policy_search.select([_pair("invert"), _pair("invert", probability=0.9)], 12) == [
        _pair("invert")
    ]


def test_merge_takes_the_best_of_every_fold():
    first, second, third = _pair("invert"), _pair("rotate", "color"), _pair("shear_x", "equalize")
    trials = [
        Trial(0, [second, first], [0.2, 0.1], 0.5),
        Trial(1, [_pair("contrast", "color"), third], [math.inf, 5.0], 0.5),
    ]
    assert policy_search.merge(trials, 9).sub_policies == (first, third, second)
    assert policy_search.merge(trials, 2).sub_policies == (first, third)
    with pytest.raises(UserError, match="changes half of its images"):
        policy_search.merge([Trial(0, [first], [math.inf], 0.5)], 9)


def _slow_trials(seconds):
    for number in itertools.count():
        time.sleep(seconds)
        yield Trial(0, [_pair("invert")], [0.1], number / 100)


def test_limits():
    trials = _slow_trials(0.02)
    assert len(tool.run_trials(trials, 7, 0, StopSignals())) == 7
    assert len(tool.run_trials(trials, 7, 10, StopSignals())) == 7
    assert next(trials).accuracy == 0.14  # no trial beyond the limit was begun
    for most in (0, 1000):
        began = time.monotonic()
        done = tool.run_trials(trials, most, 0.5 / 60, StopSignals())
        assert 1 < len(done) <= 25 and 0.5 <= time.monotonic() - began < 5
    assert len(tool.run_trials(trials, 0, 1e-9, StopSignals())) == 1


def test_a_signal_ends_the_search():
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM after 1 trials; nothing is written"):
            tool.run_trials(_slow_trials(0), 5, 0, signals)
        assert len(tool.run_trials(_slow_trials(0), 1, 0, signals)) == 1


def test_images_are_the_labelled_ones_before_normalization(run, loaded):
    _, images, labels = loaded
    assert images.dtype == np.uint8 and len(images) == PICTURES
    files = sorted((run / "data" / "train").rglob("*.png"))
    expected = {Image.open(path).tobytes(): "gr".index(path.parent.name) for path in files}
    assert {image.tobytes(): label for image, label in zip(images, labels, strict=True)} == expected
    config, classes = tool.load_run(str(run / "run"), None)
    fewer, _ = tool.load_images(config, classes, 40, seed=0)
    others, _ = tool.load_images(config, classes, 40, seed=1)
    assert np.array_equal(fewer, images[:40]) and not np.array_equal(fewer, others)


def test_images_that_stay_on_disk(tmp_path):
    files = {f"train/{'ab'[i % 2]}/{i:02d}.jpg": picture(140, 150 + i, i) for i in range(20)}
    root = write_tree(tmp_path, {**files, "train/b/bad.jpg": b"no picture"})
    config = config_lib.make({"dataset": "folder", "data_dir": str(root), "image_size": 32})
    images, labels = tool.load_images(config, ["a", "b"], 100, seed=3)
    assert len(images) == 20 and np.bincount(labels).tolist() == [10, 10]
    views_of_files = [
        views.evaluation_view(config.views, np.asarray(Image.open(root / name))[None], 32)[0]
        for name in files
    ]
    closest = [
        np.abs(views.normalize(config.views, image.astype(np.float32)) - views_of_files).mean(
            axis=(1, 2, 3)
        )
        for image in images
    ]
    assert sorted(np.argmin(closest, axis=1)) == list(range(20))
    assert [int(number) % 2 for number in np.argmin(closest, axis=1)] == labels.tolist()
    with pytest.raises(UserError, match=r"expected the 2 classes of the run, \['cat', 'dog'\]"):
        tool.load_images(config, ["cat", "dog"], 100, seed=3)


def test_harm_is_the_rise_of_the_loss(loaded, judge):
    model, images, labels = loaded
    rows = np.arange(100)
    score = tool.make_score(judge, [rows], seed=5)
    sub_policy = (Step("brightness", 1.0, 0.1), Step("posterize", 1.0, 0.2))
    harms, accuracy = score(0, 3, [sub_policy] * len(rows))  # an image for each

    def verdict(pixels):
        f1 = model.encode(views.normalize(model.view_settings, pixels))["f1"]
        logits = 10 * np.tanh(model.classify(f1)["linear"].numpy().astype(np.float64) / 10)
        of_label = logits[rows, labels[rows]]
        return np.log(np.exp(logits).sum(axis=1)) - of_label, logits.argmax(axis=1)

    pixels = tf.cast(images[rows], tf.float32)
    drawn = policies.draw(Policy((sub_policy,)), [0, 0], len(rows))
    after, guesses = verdict(policies.apply(pixels, drawn))
    rises = after - verdict(pixels)[0]
    assert sorted(harms) == pytest.approx(sorted(rises), abs=1e-3)
    assert accuracy == pytest.approx((guesses == labels[rows]).mean())


def test_doing_nothing_does_not_count(judge):
    grey_ones = np.arange(PICTURES, 2 * PICTURES)
    score = tool.make_score(judge, [grey_ones], seed=0)
    harms, _ = score(
        0,
        0,
        [
            (Step("color", 1.0, 0.0), Step("color", 1.0, 1.0)),  # of grey images
            (Step("invert", 1.0, 0.0), Step("invert", 1.0, 0.0)),
            (Step("brightness", 0.2, 0.0), Step("color", 1.0, 0.0)),  # mostly unchanged
            (Step("brightness", 1.0, 0.0), Step("color", 1.0, 0.0)),
            (Step("invert", 0.8, 0.0), Step("color", 1.0, 0.0)),
        ],
    )
    assert [math.isinf(harm) for harm in harms] == [True, True, True, False, False]


def test_a_classifier_of_colours_keeps_its_colours(judge):
    """Red and green pictures: inverting them is what harms most."""
    rows = np.arange(PICTURES)
    trials = _trials(tool.make_score(judge, np.split(rows, 2), seed=0), 40)
    found = policy_search.merge(trials, 10)
    random = Policy(tuple(policy_search.draw_random(np.random.default_rng(0), 50)))
    by_found, by_random = (judge(np.tile(rows, 4), [policy], [1, 1]) for policy in (found, random))
    assert by_found.correct.mean() > by_random.correct.mean() + 0.05
    assert by_found.changed.mean() > 0.5
    assert all(step.operation != "invert" for each in found.sub_policies for step in each)


def _start(*flags):
    command = [sys.executable, str(TOOL), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _flags(settings):
    return [f"--{name}={value}" for name, value in dataclasses.asdict(settings).items()]


def _find(model_dir, settings, output, data_dir=None):
    config, classes = tool.load_run(str(model_dir), data_dir)
    tool.find_policy(str(model_dir), config, classes, settings, str(output))


def test_the_same_seed_writes_the_same_bytes(run, tmp_path):
    outputs = [tmp_path / "a.json", tmp_path / "b.json"]
    process = _start(f"--model_dir={run / 'run'}", f"--output={outputs[0]}", *_flags(SMALL))
    shown, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert re.search(r"unaugmented +\d+\.\d% correct, +0\.0% of the images changed", shown)
    for name in ("found", "random"):
        assert re.search(rf"{name} policy +\d+\.\d% correct, +\d+\.\d% of the images", shown)
    assert re.search(r"a.json: written, sub-policies: 6, from 12 trials of \d+\.\d\d s", shown)
    assert f"--policy={outputs[0]}" in shown
    policy = policies.load(outputs[0])
    assert len(policy.sub_policies) == 6 and {len(each) for each in policy.sub_policies} == {2}

    # In another process, after the data has moved; the file that was there is replaced.
    shutil.copytree(run / "data", tmp_path / "moved")
    outputs[1].write_text("old")
    _find(run / "run", SMALL, outputs[1], str(tmp_path / "moved"))
    assert outputs[1].read_bytes() == outputs[0].read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "b.json", "moved"}


def test_an_interrupted_search_writes_nothing(run, tmp_path):
    endless = dataclasses.replace(SMALL, trials=0, minutes=10)
    process = _start(
        f"--model_dir={run / 'run'}", f"--output={tmp_path / 'a'}.json", *_flags(endless)
    )
    for line in process.stderr:  # the images have been listed, then read
        if line.startswith("reading images"):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    assert re.search(r"Stopped by SIGINT after \d+ trials; nothing is written", errors)
    assert not list(tmp_path.iterdir())


def _refused(*flags):
    process = _start(*flags)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and errors.count("\n") == 1, errors
    assert errors.startswith("error: ")
    return errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model_dir="], "--model_dir: expected the directory of a training run"),
        (["--output="], "--output: expected the policy file"),
        (["--output=policy.txt"], "--output: expected a file that ends in .json"),
        (["--output=none/policy.json"], "--output: expected a file in a directory that is there"),
        (["--trials=0"], "--trials, --minutes: expected a number above 0"),
        (["--trials=0", "--minutes=nan"], "--minutes: expected a non-negative number"),
        (["--trials=2"], "--sub_policies: expected at most 10, as many as --trials=2 tries"),
        (["--images=100"], "--images: expected at least 334 for --folds=5. Received: 100"),
        (["--folds=0"], "folds"),
        (["--model_dir=none"], "none/config.json: expected the config.json of a training run"),
        (["stray"], "stray"),
    ],
)
def test_mistakes_get_one_line(flags, message, tmp_path):
    given = [f"--model_dir={tmp_path}", f"--output={tmp_path / 'policy.json'}"]
    assert message in _refused(*given, *flags)
    assert not list(tmp_path.iterdir())


def test_a_run_without_classes(tmp_path):
    config_file.save(config_lib.Config(), config_file.path_in(tmp_path), {"classes": []})
    line = _refused(f"--model_dir={tmp_path}", f"--output={tmp_path / 'policy.json'}")
    assert "expected at least 2 classes" in line


def test_a_run_without_checkpoint(run, tmp_path):
    shutil.copy(config_file.path_in(run / "run"), config_file.path_in(tmp_path))
    with pytest.raises(UserError, match="expected a checkpoint; there is none"):
        _find(tmp_path, SMALL, tmp_path / "policy.json")


def test_too_few_images(run, tmp_path):
    with pytest.raises(UserError, match=r"--folds=5: expected at least 334 labelled .*: 150"):
        _find(run / "run", tool.Settings(), tmp_path / "policy.json")
    assert not list(tmp_path.iterdir())


def test_a_run_that_has_diverged(judge):
    def diverged(*arguments):
        verdict = judge(*arguments)
        return verdict._replace(losses=verdict.losses * np.nan)

    with pytest.raises(UserError, match="diverged"):
        tool.make_score(diverged, [np.arange(50)], seed=0)
