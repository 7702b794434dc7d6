"""The tool that runs tensorflow-addons beside our image operations."""

import pathlib
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
ENVIRONMENT = REPOSITORY / ".venv-addons"
OPERATIONS = {"rotate", "shear_x", "shear_y", "translate", "equalize", "sharpness"}


def _compare(python):
    command = [python, REPOSITORY / "tools" / "compare_with_addons.py"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_without_addons_one_line_says_what_to_do():
    result = _compare(sys.executable)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "tensorflow-addons" in line
    assert "make compare-addons" in line


@pytest.mark.slow
def test_differences_are_as_documented():
    if not list(ENVIRONMENT.glob("lib/python3*/site-packages/tensorflow_addons")):
        pytest.skip("no tensorflow-addons in .venv-addons: run make compare-addons first")
    result = _compare(ENVIRONMENT / "bin" / "python")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    rows = [row for row in rows if row[0] in ("golden", "generated")]
    for images in ("golden", "generated"):
        assert {row[1] for row in rows if row[0] == images} == OPERATIONS
    for row in rows:
        if row[1] in ("translate", "equalize"):
            assert row[-3:] == ["100.00%", "100.00%", "0.00"]
