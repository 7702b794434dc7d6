"""Settings: limits, the data sets' recipes, config.json, and every flag file."""

import dataclasses
import json
import os

import pytest

from amdim_tf import config as config_lib
from amdim_tf import config_file
from amdim_tf.errors import UserError


def test_data_set_recipes():
    cifar = config_lib.make({"dataset": "cifar10"})
    assert (cifar.data.image_size, cifar.views.translate, cifar.views.crop_scale) == (32, 4, (0, 0))
    assert cifar.views.jitter == (0.4, 0.4, 0.4, 0.2)
    stl = config_lib.make({"dataset": "stl10"})
    assert (stl.data.image_size, stl.views.evaluation_resize) == (64, 70)
    assert stl.views.mean == pytest.approx((0.43 * 255, 0.42 * 255, 0.39 * 255))
    assert stl.views.std == pytest.approx((0.27 * 255, 0.26 * 255, 0.27 * 255))
    imagenet = config_lib.make({"dataset": "imagenet2012"})
    assert (imagenet.data.image_size, imagenet.views.evaluation_resize) == (128, 146)
    assert imagenet.views.jitter[3] == 0.1
    strong = config_lib.make({"dataset": "imagenet2012", "augmentation": "strong"})
    assert strong.views.crop_scale == (0.2, 0.9)
    assert (strong.views.jitter_probability, strong.views.lighting) == (1.0, 0.1)
    assert strong.views.policy == "autoaugment_imagenet"


def test_a_given_setting_wins_over_the_recipe():
    config = config_lib.make({"dataset": "stl10", "image_size": 128, "crop_scale": (0.5, 0.6)})
    assert config.views.crop_scale == (0.5, 0.6)
    assert config.views.evaluation_resize == 140


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"dataset": "mnist"}, "--dataset"),
        ({"image_size": 48}, "--image_size: expected one of 32, 64, 128. Received: 48"),
        ({"batch_size": 1}, "--batch_size: expected a whole number of at least 2 and at most"),
        ({"seed": 2**31}, "--seed"),
        ({"learning_rate": 10**400}, "--learning_rate"),
        ({"milestones": (1e308,)}, "--milestones"),
        ({"epochs": 1e300}, "--epochs"),
        ({"batch_size": 2.5}, "--batch_size"),
        ({"batch_size": True}, "--batch_size"),
        ({"learning_rate": float("nan")}, "--learning_rate"),
        ({"learning_rate": -1.0}, "--learning_rate"),
        ({"use_bn": 1}, "--use_bn: expected true or false. Received: 1"),
        ({"tasks": ("1to6",)}, "--tasks"),
        ({"tasks": ("1to5", "1to5")}, "--tasks"),
        ({"tasks": ()}, "--tasks"),
        ({"crop_scale": (0.3,)}, "--crop_scale: expected 2 values"),
        ({"crop_scale": (0.9, 0.3)}, "--crop_scale"),
        ({"crop_scale": (0.0, 0.3)}, "--crop_scale"),
        ({"jitter": (0.4, 0.4, 0.4, "0.2")}, "--jitter"),
        ({"ndf": 128, "n_rkhs": 256}, "--n_rkhs: expected at least 512"),
        ({"evaluation_resize": 16}, "--evaluation_resize"),
        ({"augmentation": "weak"}, "--augmentation: expected one of none, basic, strong"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_bad_settings_name_the_flag(settings, named):
    with pytest.raises(UserError) as error:
        config_lib.make(settings)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_json_round_trip(tmp_path):
    config = config_lib.make({"dataset": "stl10", "tasks": ("7to7",), "milestones": (1.5, 2.0)})
    path = config_file.path_in(tmp_path)
    config_file.save(config, path, {"classes": ["cat"]})
    assert config_file.load(path) == (config, {"classes": ["cat"]})
    assert list(tmp_path.iterdir()) == [path]


def _edited(tmp_path, edit):
    path = config_file.path_in(tmp_path)
    config_file.save(config_lib.Config(), path, {"classes": []})
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    "edit, named",
    [
        (lambda d: d.update(format_version=1), "expected format_version 2. Received: 1."),
        (lambda d: d.update(format_version=3), "expected format_version 2. Received: 3."),
        (lambda d: d.update(starts={"step": 1}), "'starts'"),
        (lambda d: d.pop("model"), "'model'"),
        (lambda d: d["model"].pop("ndf"), "ndf"),
        (lambda d: d["model"].update(ndf="four"), "--ndf"),
        (lambda d: d["model"].update(colour=1), "colour"),
        (lambda d: d["data"].update(dataset="../outside"), "--dataset"),
        (lambda d: d["model"].update(ndf=10**9), "--ndf"),
        (lambda d: d.pop("classes"), "'classes'"),
        (lambda d: d.update(classes="cat"), "'classes'"),
        (lambda d: d.update(classes=[1]), "'classes'"),
    ],
)
def test_bad_files_name_the_place(tmp_path, edit, named):
    path = _edited(tmp_path, edit)
    with pytest.raises(UserError) as error:
        config_file.load(path)
    assert named in str(error.value) and str(path) in str(error.value)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(UserError, match="there is none"):
        config_file.load(config_file.path_in(tmp_path))
    path = config_file.path_in(tmp_path)
    for text in ("{", "[]", "null", "\x00", "[" * 100000):
        path.write_text(text)
        with pytest.raises(UserError, match=str(path)):
            config_file.load(path)


def test_what_is_no_file_does_not_hang(tmp_path):
    os.mkfifo(config_file.path_in(tmp_path))
    with pytest.raises(UserError, match="not a regular file"):
        config_file.load(config_file.path_in(tmp_path))


def test_links_are_replaced_and_not_followed(tmp_path):
    victim, path = tmp_path / "victim", config_file.path_in(tmp_path)
    victim.write_text("precious")
    path.symlink_to(victim)
    path.with_name("config.json.partial").symlink_to(victim)
    config_file.save(config_lib.Config(), path, {"classes": []})
    assert victim.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "victim"]
    assert config_file.load(path)[0] == config_lib.Config()


def test_what_may_change_in_mid_run():
    before = config_lib.make({"dataset": "cifar10", "epochs": 2.0})
    after = config_lib.update(before, {"epochs": 3.0, "log_steps": 7})
    assert config_file.changes(before, after, "run") == {"epochs": [2.0, 3.0], "log_steps": [50, 7]}
    other = config_lib.update(after, {"seed": 5, "crop_scale": (0.2, 0.5)})
    with pytest.raises(UserError) as error:
        config_file.changes(before, other, "run")
    assert "--crop_scale=0.2,0.5 (there: 0.0,0.0); --seed=5 (there: 0)." in str(error.value)


def test_a_run_is_one_with_checkpoints(tmp_path):
    config_file.path_in(tmp_path).write_text("left behind")
    assert config_file.run_in(tmp_path) is None
    (config_file.checkpoints_in(tmp_path) / "step-00000001").mkdir(parents=True)
    with pytest.raises(UserError, match="expected readable JSON"):
        config_file.run_in(tmp_path)
    config_file.path_in(tmp_path).unlink()
    with pytest.raises(UserError, match="there is none"):
        config_file.run_in(tmp_path)


def test_every_setting_has_one_home():
    names = [
        field.name
        for section in dataclasses.fields(config_lib.Config)
        for field in dataclasses.fields(getattr(config_lib.Config(), section.name))
    ]
    assert len(names) == len(set(names)) == len(config_lib.SETTINGS)
    assert all(field.metadata["help"] for _, field in config_lib.SETTINGS.values())
