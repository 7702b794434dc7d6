"""The contact sheet of views."""

import numpy as np
import pytest
from PIL import Image
from test_train import refused, run

from amdim_tf import config as config_lib
from amdim_tf import figures


def test_sheet_shows_pairs_side_by_side():
    config = config_lib.make({"dataset": "scenes", "batch_size": 8, "augmentation": "none"})
    sheet = figures.views_sheet(config, 5)
    # Two views of 96 pixels, a line of 1 on each side; six pairs fit into a row.
    assert sheet.shape == (98, 6 * 194, 3)
    for pair in range(5):
        first, second = (
            sheet[1:97, 194 * pair + 1 + 96 * view : 194 * pair + 97 + 96 * view] for view in (0, 1)
        )
        np.testing.assert_array_equal(first, second)
        assert first.std() > 5
    augmented = figures.views_sheet(config_lib.make({"dataset": "scenes", "batch_size": 8}), 5)
    assert np.any(augmented[1:97, 1:97] != augmented[1:97, 97:193])


@pytest.mark.slow
def test_program_writes_the_sheet(tmp_path):
    done = run(
        "visualize", "--figures=views", "--dataset=scenes", "--policy=randaugment(2,9)",
        f"--output_dir={tmp_path / 'out'}", "--pairs=7",
    )  # fmt: skip
    path = tmp_path / "out" / "views.png"
    assert str(path) in done.stdout
    assert Image.open(path).size == (6 * 194, 2 * 98)


@pytest.mark.parametrize(
    "flags, named",
    [
        ([], "--output_dir"),
        (["--output_dir=OUT", "--figures=heat"], "--figures"),
        (["--output_dir=OUT", "--pairs=30000"], "--batch_size"),
        (["--output_dir=OUT", "--model_dir=OUT"], "config.json"),
        (["--output_dir=OUT", "--policy=nothing"], "--policy"),
    ],
)
def test_mistakes_get_one_line(flags, named, tmp_path):
    flags = [flag.replace("OUT", str(tmp_path / "out")) for flag in flags]
    assert named in refused("visualize", *flags)
    assert not (tmp_path / "out").exists()
