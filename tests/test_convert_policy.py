"""tools/convert_policy.py, run as a program."""

import pathlib
import subprocess
import sys

import pytest

from amdim_tf import policy_tables
from amdim_tf.policy_tables import Step

TOOL = pathlib.Path(__file__).resolve().parents[1] / "tools" / "convert_policy.py"
EXAMPLE = "[[('Contrast', 0.83, 0.81), ('Rotate', 0.33, 0.36)], [('Invert', 0.5, 0.2)]]"
EXPECTED = (
    (Step("contrast", 0.83, 0.81), Step("rotate", 0.33, pytest.approx(0.28))),
    (Step("invert", 0.5, 0.2),),
)


def convert(directory, text, *flags, name="list.py"):
    """Runs the tool on a file with `text`; returns the finished process and the output's path."""
    source, output = directory / name, directory / "policy.json"
    if isinstance(text, bytes):
        source.write_bytes(text)
    else:
        source.write_text(text)
    command = [sys.executable, str(TOOL), f"--input={source}", f"--output={output}", *flags]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60)
    return done, output


@pytest.mark.parametrize(
    "text",
    [
        EXAMPLE,
        EXAMPLE.replace("(", "[").replace(")", "]").replace("'", '"'),  # JSON
        f"policy = {EXAMPLE}\n",
        f'"""A comment."""\nimport torch\n\nsizes = [1, 2]\n\ndef fa():\n    return {EXAMPLE}\n',
        f"def fa_reduced():\n    p = {EXAMPLE}\n    return p\n",
    ],
)
def test_forms_of_the_list(text, tmp_path):
    done, output = convert(tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert "sub-policies: 2" in done.stdout
    assert policy_tables.load(output).sub_policies == EXPECTED


def test_one_of_several_lists(tmp_path):
    text = (
        f"def one():\n    p = {EXAMPLE}\n    return p\ndef two():\n    return [[('Color', 1, 0)]]\n"
    )
    done, output = convert(tmp_path, text)
    assert done.returncode == 2
    assert "Names in the file: one, p, two; choose one with --name" in done.stderr
    assert not output.exists()
    done, output = convert(tmp_path, text, "--name=two")
    assert done.returncode == 0, done.stderr
    assert policy_tables.load(output).sub_policies == ((Step("color", 1.0, 0.0),),)


@pytest.mark.parametrize(
    ("theirs", "level", "ours", "parameter"),  # the parameter: what their level does, by hand
    [
        ("ShearX", 0.0, "shear_x", 0.3),  # -0.3 or 0.3
        ("ShearX", 0.75, "shear_x", 0.15),
        ("ShearY", 0.5, "shear_y", 0.0),
        ("TranslateX", 1.0, "translate_x", 0.45),
        ("TranslateY", 0.25, "translate_y", 0.225),
        ("Rotate", 0.9, "rotate", 24.0),
        ("Rotate", 0.1, "rotate", 24.0),
        ("Solarize", 0.25, "solarize", 64.0),
        ("Posterize", 0.24, "posterize", 4.0),  # 4.96 bits, cut off
        ("Posterize", 0.99, "posterize", 7.0),
        ("Posterize", 1.0, "posterize", 8.0),
        ("Posterize2", 0.6, "posterize", 4.0),
        ("Contrast", 0.0, "contrast", 0.1),
        ("Color", 0.5, "color", 1.0),
        ("Brightness", 1.0, "brightness", 1.9),
        ("Sharpness", 0.25, "sharpness", 0.55),
        ("Cutout", 0.5, "cutout", 0.1),
        ("AutoContrast", 0.5, "autocontrast", 0.0),
        ("Invert", 0.5, "invert", 0.0),
        ("Equalize", 0.5, "equalize", 0.0),
    ],
)
def test_levels(theirs, level, ours, parameter, tmp_path):
    done, output = convert(tmp_path, f"[[({theirs!r}, 0.5, {level})]]")
    assert done.returncode == 0, done.stderr
    assert ("became 4: 1" in done.stdout) == (theirs == "Posterize2")
    ((step,),) = policy_tables.load(output).sub_policies
    assert step[:2] == (ours, 0.5)
    assert policy_tables.parameter(ours, step.level) == pytest.approx(parameter)


HARM = "__import__('os').system('touch harmed')"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HARM, "expected one list of sub-policies. Received: 0"),
        (f"p = {HARM}", "expected one list of sub-policies. Received: 0"),
        (f"p = [[{HARM}]]", "line 1: expected a list of texts and numbers only"),
        (f"p = [[('Rotate', {HARM}, 0)]]", "line 1: expected a list of texts and numbers only"),
        ("p = [[('Rotate', 0.5, 0.5)] * 9**9]", "expected one list of sub-policies. Received: 0"),
        ("p = [[('Rotate', 9**9**9, 0.5)]]", "expected a list of texts and numbers only"),
        ("", "expected one list of sub-policies. Received: 0. Names in the file: none"),
        ("[[(", "expected a Python or JSON list"),
        ("[" * 5000, "expected a Python or JSON list"),
        ("p = [[" + "-" * 100_000 + "1]]", "expected a Python or JSON list"),
        ("[[0]]\0", "expected a Python or JSON list"),
        (b"\xff\xfe", "expected a readable text file"),
        ("#" * 1_000_001, "expected at most 1000000 bytes"),
        ("[[('Flip', 0.5, 0.5)]]", "sub-policy 1, step 1: expected an operation among ShearX"),
        ("[[('rotate', 0.5, 0.5)]]", "sub-policy 1, step 1: expected an operation among ShearX"),
        ("[[('Rotate', 0.5)]]", "step 1: expected [operation, probability, level]"),
        ("[[('Rotate', 0.5, 0.5)], 'Rotate']", "sub-policy 2: expected a list"),
        ("[[('Rotate', 0.5, 7)]]", "step 1: expected a level from 0 to 1. Received: 7"),
        ("[[('Rotate', 1.5, 0)]]", "step 1: expected a probability from 0 to 1. Received: 1.5"),
        ("[[('Rotate', 0x" + "f" * 9999 + ", 0)]]", "Received: a number that is too long"),
        ("[[('Rotate', 1j, 0)]]", "expected a probability from 0 to 1. Received: 1j"),
    ],
)
def test_mistakes(text, message, tmp_path):
    done, _ = convert(tmp_path, text)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'list.py'}: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert {file.name for file in tmp_path.iterdir()} == {"list.py"}


def test_flags(tmp_path):
    for flags, message in (
        ([], "--input: expected the file"),
        (["--input=list.py"], "--output: expected the policy file"),
        (
            ["--input=list.py", "--output=policy.txt"],
            "--output: expected a path that ends in .json",
        ),
        (["--input=list.py", "--output=policy.json"], "list.py: expected a file; there is none"),
    ):
        command = [sys.executable, str(TOOL), *flags]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert message in done.stderr


def test_starts_without_tensorflow(tmp_path):
    (tmp_path / "list.py").write_text(EXAMPLE)
    code = (
        "import runpy, sys, atexit\n"
        "atexit.register(lambda: print('tensorflow' in sys.modules))\n"
        "sys.argv = ['tool', '--input=list.py', '--output=policy.json']\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
