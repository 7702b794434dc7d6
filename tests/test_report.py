"""The report: everything from files, safe to open, no error in a browser."""

import html.parser
import json
import pathlib
import shutil
import subprocess
import sys

import pytest
from test_train import ROOT

from amdim_tf import config as config_lib
from amdim_tf import config_file
from amdim_tf.errors import UserError

sys.path.append(str(ROOT / "tools"))
import report as report_tool

HOSTILE = "<script>alert(1)</script>|x"


def _write_run(directory, accuracy, **settings):
    settings = {"ndf": 4, "n_rkhs": 16, "n_depth": 1, "learning_rate": 1e-3, **settings}
    path = config_file.path_in(directory)
    path.parent.mkdir(parents=True)
    config_file.save(config_lib.make(settings), path, {"classes": ["a", "b"]})
    (directory / "metrics.csv").write_text(
        "step,seconds,loss,linear_accuracy\n10,1,9.5,0.2\n20,2,8.5,0.4\nbroken,row\n"
    )
    linear = {"accuracy": accuracy, "confusion": [[9, 1], [2, 8]]}
    results = {
        "dataset": "scenes", "step": 20, "classes": [HOSTILE, "b"], "linear": linear,
        "few_labels": {"10%": {"mean": 0.3, "std": 0.01}},
        "baselines": {"pixels": {"linear": {"accuracy": 0.111}}},
        "bag_of_features": {"accuracy": 0.457},
        "segmentation": {"7x7": {"mixture": {"adjusted_rand_index": 0.4061, "iou": 0.6}}},
        "command": "python -m amdim_tf.evaluate --model_dir=run",
    }  # fmt: skip
    evaluation = directory / "evaluation"
    evaluation.mkdir()
    (evaluation / "scenes.json").write_text(json.dumps(results))
    (evaluation / "scenes_history.csv").write_text(f"step,linear\n10,0.2\n20,{accuracy}\n")
    return directory


def _report(*words, code=0):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "report.py"), *map(str, words)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    runs = [_write_run(root / "one", 0.523), _write_run(root / f"two{HOSTILE[:8]}", 0.618)]
    _report(f"--output_dir={root / 'out'}", *runs)
    return root / "out"


def test_markdown_has_runs_paper_curves_and_commands(report):
    text = (report / "report.md").read_text()
    for part in (
        "52.3",
        "61.8",
        "11.1",
        "45.7",
        "0.406",
        "30.0 ± 1.0",
        "68.1",
        "CPC, huge",
        "--ndf=4",
    ):
        assert part in text
    for line in text.splitlines():
        if line.startswith("!["):
            assert (report / line.rpartition("(")[2].rstrip(")")).stat().st_size > 1000
    assert text.count("![") == 5


def test_runs_of_one_name_stay_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [pathlib.Path(name) for name in ("a/base", "b/base", "wide")]
    for path in paths:
        _write_run(path, 0.5)
    runs = report_tool.read_runs([*paths, paths[0]])
    assert [run.label for run in runs] == ["a/base", "b/base", "wide"]
    monkeypatch.chdir(tmp_path / "wide")
    assert report_tool.read_runs([pathlib.Path(".")])[0].label == "wide"


def test_a_command_has_steps_or_epochs(tmp_path):
    settings = {"epochs": 7.0, "train_steps": 90, "milestones": (2.0, 3.0)}
    (run,) = report_tool.read_runs([_write_run(tmp_path / "run", 0.5, **settings)])
    command = report_tool.training_command(run)
    assert "--train_steps=90" in command and "--epochs" not in command
    assert "--milestones=2.0,3.0 " in command


def test_page_loads_nothing_and_escapes_names(report):
    page = (report / "report.html").read_text()
    tags = []

    class Parser(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            tags.append((tag, dict(attributes)))

    Parser().feed(page)
    assert "script" not in [tag for tag, _ in tags]
    addresses = [a.get("src") or a.get("href") for _, a in tags if "src" in a or "href" in a]
    assert len(addresses) == 6 and all(address.startswith("data:") for address in addresses)


@pytest.mark.skipif(not shutil.which("chromium"), reason="Chromium is not installed")
def test_page_opens_in_chromium_without_an_error(report, tmp_path):
    done = subprocess.run(
        [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0",
            f"--screenshot={tmp_path / 'page.png'}", "--dump-dom",
            (report / "report.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    assert "amdim_tf report</h1>" in done.stdout and done.stdout.count("<img") == 5


def test_mistakes_get_one_line(tmp_path):
    assert "one model_dir or more" in _report(code=2).stderr
    assert "config.json" in _report(tmp_path, code=2).stderr
    run = _write_run(tmp_path / "run", 0.5)
    (run / "evaluation" / "scenes.json").write_text("[1")
    assert "scenes.json: expected JSON" in _report(run, code=2).stderr
    shutil.rmtree(run / "evaluation")
    done = _report(f"--output_dir={tmp_path / 'out'}", run, code=2)
    assert "Run amdim_tf.evaluate first" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


ODD = [
    {"step": "20"},
    {"step": True},
    {"command": 5},
    {"linear": None},
    {"linear": {}},
    {"mlp": {"accuracy": "high"}},
    {"knn": {"accuracy": float("nan")}},
    {"baselines": [1]},
    {"baselines": {"pixels": None}},
    {"baselines": {"pixels": {"linear": {"accuracy": [0.5]}}}},
    {"few_labels": [0.3]},
    {"few_labels": {"10%": {"mean": 0.3}}},
    {"few_labels": {"10%": 0.3}},
    {"linear": {"accuracy": 0.5, "confusion": [[1, 2], [3]]}},
    {"linear": {"accuracy": 0.5, "confusion": [[1, 2], ["3", 4]]}},
    {"linear": {"accuracy": 0.5, "confusion": "none"}},
    {"classes": None},
    {"classes": ["a", 2]},
    {"segmentation": None},
    {"segmentation": {"7x7": [1]}},
    {"segmentation": {"7x7": {"mixture": {"iou": 0.5}}}},
]


@pytest.mark.parametrize("odd", ODD, ids=map(str, range(len(ODD))))
def test_odd_results_are_refused_by_name(tmp_path, odd):
    path = _write_run(tmp_path / "run", 0.5) / "evaluation" / "scenes.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **odd}))
    with pytest.raises(UserError, match=r"scenes\.json: expected .*Evaluate the run again"):
        report_tool.read_runs([tmp_path / "run"])


@pytest.mark.parametrize("text", ["[" * 100_000, "7", "[]", "{}", "\udcff"])
def test_results_that_are_no_results_are_refused_by_name(tmp_path, text):
    run = _write_run(tmp_path / "run", 0.5)
    path = run / "evaluation" / "scenes.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"scenes\.json: expected"):
        report_tool.read_runs([run])


def test_odd_figures_and_texts_do_not_end_a_report(tmp_path):
    run = _write_run(tmp_path / "run$_$\udc80", 0.5)
    path = run / "evaluation" / "scenes.json"
    results = {**json.loads(path.read_text()), "command": "odd \udc80", "classes": ["\ud800", "$x"]}
    path.write_text(json.dumps(results))
    odd = "step,loss,linear\n1,nan,nan\n2,inf,inf\n1e300,3,3\n4,-1e300,-1e300\n"
    (run / "metrics.csv").write_text(odd)
    (run / "evaluation" / "scenes_history.csv").write_text(odd)
    report_tool.write(report_tool.read_runs([run]), tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"report.md", "report.html", "confusion_0.png"}  # no curve has a point left
    assert "odd ?" in (tmp_path / "out" / "report.md").read_text()


def test_a_table_with_an_endless_field_is_refused_by_name(tmp_path):
    run = _write_run(tmp_path / "run", 0.5)
    (run / "metrics.csv").write_text("step,loss\n1," + "9" * 200_000)
    with pytest.raises(UserError, match=r"metrics\.csv: expected rows of numbers"):
        report_tool.write(report_tool.read_runs([run]), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_directory_in_the_way_of_a_report_is_refused_before_anything_is_drawn(tmp_path):
    run = _write_run(tmp_path / "run", 0.5)
    (tmp_path / "out" / "report.md").mkdir(parents=True)
    with pytest.raises(UserError, match=r"--output_dir: expected to write .*report\.md"):
        report_tool.write(report_tool.read_runs([run]), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.md"]
