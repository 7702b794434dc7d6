"""The plan of a configuration on a machine, beside what is known of some."""

import pathlib
import subprocess
import sys

import pytest
from pictures import picture, write_tree

from amdim_tf import config as config_lib
from amdim_tf.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture(scope="module")
def plan():
    import plan

    return plan


def _imagenet(**settings):
    return config_lib.make(
        {
            "dataset": "imagenet2012", "ndf": 192, "n_rkhs": 1536, "n_depth": 8,
            "batch_size": 480, "epochs": 50.0, **settings,
        }
    )  # fmt: skip


def test_the_paper_s_two_days_on_four_v100s():
    """By the program, as a user runs it; the flag file is the paper's small ImageNet model."""
    done = subprocess.run(
        [sys.executable, "tools/plan.py", "--flagfile=configs/imagenet.cfg", "--hardware=v100x4",
         "--precision=mixed_float16"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("schedule")]
    days = float(line.split("(")[1].split()[0])
    assert days == pytest.approx(2.0, abs=0.2)
    assert ": it fits" in done.stdout and "Assumed: 10% of the peak" in done.stdout


LARGE = {"ndf": 320, "n_rkhs": 2560, "n_depth": 10, "batch_size": 1008}


@pytest.mark.parametrize(
    "hardware, settings", [("v100x4", {}), ("v100x8", LARGE), ("a100x4", LARGE), ("a100x1", LARGE)]
)
def test_what_does_not_fit_fits_with_the_microbatch_it_names(plan, hardware, settings):
    device, count = plan.parse_hardware(hardware)
    config = _imagenet(**settings)
    made = plan.make_plan(config, device, count, 1_281_167)
    share = config.training.batch_size // count
    assert made.memory > made.capacity and share % made.fitting == 0 and made.fitting > 1
    again = plan.make_plan(_imagenet(**settings, microbatch=made.fitting), device, count, 1_281_167)
    assert again.memory <= again.capacity
    assert again.hours == pytest.approx(made.hours * 4 / 3)


def test_a_microbatch_is_not_named_for_synchronized_batch_norm(plan):
    device, count = plan.parse_hardware("v100x4")
    config = _imagenet(batch_norm="synchronized")
    made = plan.make_plan(config, device, count, 1000)
    text = "\n".join(plan.describe(made, config, device, count))
    assert f"--microbatch={made.fitting} would with --batch_norm=per_replica" in text


def test_a_chip_of_two_devices(plan):
    device, count = plan.parse_hardware("tpu_v3x4")
    assert (count, device.memory) == (8, 16)


def test_what_replicas_exchange(plan):
    device, _ = plan.parse_hardware("a100x1")
    alone = plan.make_plan(_imagenet(), device, 1, 1000)
    four = plan.make_plan(_imagenet(), device, 4, 1000)
    assert (alone.gathered, alone.reduced) == (0, 0)
    assert four.gathered == 480 * 2 * 2 * 1536 * 4  # both views, φ1 and a cell of φ5, float32
    assert four.reduced == 4 * four.parameters
    assert four.hours == pytest.approx(alone.hours / 4)


def test_memory_of_a_step_that_was_measured(plan):
    """(128, 1024, 10) at batch 32 took 1.4 to 1.5 GiB by tools/benchmark.py train."""
    config = config_lib.make({"ndf": 128, "n_rkhs": 1024, "n_depth": 10, "batch_size": 32})
    made = plan.make_plan(config, plan.DEVICES["v100"], 1, 1000)
    assert 1.2 < made.memory / 2**30 < 1.7


@pytest.mark.parametrize("name", ["v100", "a100", "h100", "tpu_v4"])
def test_half_precision_is_not_slower(plan, name):
    device = plan.DEVICES[name]
    single, half = (
        plan.make_plan(_imagenet(precision=precision), device, 4, 1000).hours
        for precision in ("float32", device.halves[0])
    )
    assert half <= single


def test_what_the_hardware_or_the_images_do_not_allow(plan):
    with pytest.raises(UserError, match="--precision: expected float32 or mixed_float16, which"):
        plan.make_plan(_imagenet(precision="mixed_bfloat16"), plan.DEVICES["v100"], 4, 1000)
    with pytest.raises(UserError, match="--batch_size: expected at most 400, the number"):
        plan.make_plan(_imagenet(), plan.DEVICES["v100"], 4, 400)


def test_images_of_a_folder_are_counted(plan, tmp_path):
    write_tree(tmp_path, {f"train/a/{n}.jpg": picture(40, 40, n) for n in range(3)})
    data = {"dataset": "folder", "data_dir": str(tmp_path)}
    assert plan._count_images(config_lib.make(data)) == 3
    with pytest.raises(UserError, match="--images: expected the number"):
        plan._count_images(config_lib.make({"dataset": "folder"}))


@pytest.mark.parametrize("text", ["", "v100x", "x4", "k80x4", "v100x0", "v100x-1", "v100 x 4"])
def test_bad_hardware_gets_one_line(plan, text):
    with pytest.raises(UserError, match="--hardware: expected NAMExCOUNT"):
        plan.parse_hardware(text)


def test_a_name_alone_is_one_device(plan):
    assert plan.parse_hardware("A100") == plan.parse_hardware("a100x1")


def test_times_have_a_fitting_unit(plan):
    units = [plan._shown_time(hours) for hours in (1 / 3600, 0.5, 48)]
    assert units == ["1 seconds", "30 minutes", "48 hours (2 days)"]


def test_memory_that_is_short_by_little_is_not_shown_as_equal(plan):
    device, count = plan.parse_hardware("v100x4")
    config = _imagenet()
    made = plan.make_plan(config, device, count, 1000)
    short = made._replace(capacity=made.memory - 1.0)
    text = "\n".join(plan.describe(short, config, device, count))
    assert "memory of each device more than " in text
    assert f"; {plan._shown_time(made.hours * 4 / 3)} in microbatches" in text
