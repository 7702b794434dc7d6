"""Puts runs side by side, with the paper's results beside them, as Markdown and as one HTML page.

Usage:
    python tools/report.py --output_dir=report runs/quickstart runs/wide

Writes report.md with its pictures, and report.html, which holds them itself: tables of results, of
settings and of what the paper and earlier methods reach, curves, confusion matrices and commands.
Nothing is computed anew: runs are read as `amdim_tf.train` and `amdim_tf.evaluate` left them.
"""

import base64
import html
import pathlib
import re
import shlex
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from absl import flags
from evaluated_runs import MEASURES, PROBES, Run, read_runs

from amdim_tf import cli_flags, safe_files
from amdim_tf import config as config_lib
from amdim_tf.errors import UserError
from amdim_tf.setting_fields import shown

flags.DEFINE(
    cli_flags.PATH, "output_dir", "report", "Directory for the report; it is made if need be."
)

# Linear and MLP accuracy in %, from the paper's tables.
_PAPER = (
    ("AMDIM, CIFAR-10, large", "91.2", "93.1"),
    ("AMDIM, CIFAR-100, large", "70.2", "72.8"),
    ("AMDIM, STL-10", "94.2", "-"),
    ("AMDIM, ImageNet, small, 50 epochs", "62.7", "-"),
    ("AMDIM, ImageNet, large, 150 epochs", "68.1", "69.5"),
    ("AMDIM, ImageNet to Places205, large", "55.0", "-"),
)
_EARLIER = (
    ("Rotation", "55.4", "48.0"),
    ("Exemplar", "46.0", "42.7"),
    ("Patch offset", "51.4", "45.3"),
    ("Jigsaw", "44.6", "42.2"),
    ("CPC, big", "48.7", "-"),
    ("CPC, huge", "61.0", "-"),
)


def training_command(run: Run) -> str:
    """A command that trains such a run: every setting that is not the data set's default."""
    defaults = config_lib.settings_of(config_lib.make({"dataset": run.settings["dataset"]}))
    unused = {"epochs"} if run.settings["train_steps"] else set()  # train refuses both
    given = [
        f"--{name}={shown(value)}"
        for name, value in run.settings.items()
        if name == "dataset" or (value != defaults[name] and name not in unused)
    ]
    return shlex.join(["python", "-m", "amdim_tf.train", *given, f"--model_dir={run.directory}"])


def _percent(found: dict, probe: str) -> str:
    return f"{100 * found[probe]['accuracy']:.1f}" if probe in found else "-"


def result_rows(runs: list[Run]) -> list[list[str]]:
    """A row per run and data set, and one for each of its baselines."""
    rows = []
    for run in runs:
        for dataset, found in run.evaluations.items():
            sets = {f"{run.label}, step {found['step']}": found}
            sets |= {f"· {name}": value for name, value in found.get("baselines", {}).items()}
            for name, value in sets.items():
                few = value.get("few_labels", {}).get("10%")
                share = f"{100 * few['mean']:.1f} ± {100 * few['std']:.1f}" if few else "-"
                shares = [*(_percent(value, one) for one in PROBES), share]
                rows.append([name, dataset, str(found.get("test_images", "-")), *shares])
    return rows


def segmentation_rows(runs: list[Run]) -> list[list[str]]:
    """A row for each way to divide the images of a data set, of the runs that have a mixture."""
    return [
        [run.label, dataset, method.replace("_", " "),
         *(f"{measures[name]:.3f}" for name in MEASURES)]
        for run in runs
        for dataset, found in run.evaluations.items()
        for method, measures in found.get("segmentation", {}).get("7x7", {}).items()
    ]  # fmt: skip


def setting_rows(runs: list[Run]) -> list[list[str]]:
    """A row per setting that differs between the runs, or all of the model's for a single run."""
    names = [
        name
        for name in runs[0].settings
        if len({run.settings[name] for run in runs}) > 1
        or name in ("dataset", "image_size", "ndf", "n_rkhs", "n_depth", "batch_size")
    ]
    return [[name, *(shown(run.settings[name]) for run in runs)] for name in names]


def draw(runs: list[Run], directory: pathlib.Path) -> dict[str, pathlib.Path]:
    """Draws the curves of all runs, and copies their confusion matrices; caption -> file."""
    from amdim_tf import charts, evaluation_files

    pictures = {}

    def curves(caption, name, series, x, y):
        series = {
            run: [point for point in points if all(abs(n) < charts.MOST_SHOWN for n in point)]
            for run, points in series.items()
        }
        series = {run: points for run, points in series.items() if points}
        if series:
            pictures[caption] = directory / name
            charts.lines(series, x, y, caption, directory / name)

    metrics = {
        run.label: evaluation_files.read_table(run.directory / "metrics.csv") for run in runs
    }
    loss = {label: _points(rows, "step", "loss") for label, rows in metrics.items()}
    curves("Sum of the NCE losses in training", "loss.png", loss, "training step", "loss")
    online = {label: _points(rows, "step", "linear_accuracy") for label, rows in metrics.items()}
    curves("Online linear accuracy, on training views", "online.png", online, "training step",
           "accuracy")  # fmt: skip
    for dataset in sorted({name for run in runs for name in run.evaluations}):
        series = {}
        for run in runs:
            path = run.directory / "evaluation" / f"{dataset}_history.csv"
            history = evaluation_files.comparable(
                evaluation_files.read_history(path), run.evaluations.get(dataset, {})
            )
            series[run.label] = [
                (row["step"], 100 * row["linear"]) for row in history if "linear" in row
            ]
            confusion = run.evaluations.get(dataset, {}).get("linear", {}).get("confusion")
            if confusion:
                caption = f"{run.label} on {dataset}: confusion of the linear classifier"
                pictures[caption] = directory / f"confusion_{len(pictures)}.png"
                classes = run.evaluations[dataset]["classes"]
                charts.confusion_matrix(confusion, classes, caption, pictures[caption])
        caption = f"Linear accuracy on the test images of {dataset}"
        curves(caption, f"{dataset}.png", series, "training step", "accuracy, %")
    return pictures


def _points(rows: list[dict[str, str]], x: str, y: str) -> list[tuple[float, float]]:
    """Points of two columns; rows that lack one are left out."""
    points = []
    for row in rows:
        try:
            points.append((float(row[x]), float(row[y])))
        except (KeyError, TypeError, ValueError):
            continue
    return points


def sections(runs: list[Run]) -> list[tuple[str, list[str], list[list[str]]]]:
    """The tables of the report: (title, head, rows)."""
    tables = [
        (
            "Results, % of test images",
            [
                "features",
                "data",
                "test images",
                "linear",
                "MLP",
                "kNN (20)",
                "bag of features",
                "10% of labels",
            ],
            result_rows(runs),
        ),
        (
            "Segmentation at 7x7",
            ["run", "data", "regions by", "adjusted Rand index", "best-matching IoU"],
            segmentation_rows(runs),
        ),
        ("The paper, %", ["model", "linear", "MLP"], [list(row) for row in _PAPER]),
        (
            "Earlier methods, linear, %",
            ["method", "ImageNet", "Places205"],
            [list(row) for row in _EARLIER],
        ),
        ("Settings", ["setting", *(run.label for run in runs)], setting_rows(runs)),
    ]
    return [table for table in tables if table[2]]


def commands(runs: list[Run]) -> list[str]:
    """The commands behind the figures."""
    evaluated = [
        command
        for run in runs
        for found in run.evaluations.values()
        for command in (*found.get("earlier_commands", ()), found.get("command"))
        if command
    ]
    return [*(training_command(run) for run in runs), *evaluated]


def markdown(runs: list[Run], pictures: dict[str, pathlib.Path]) -> str:
    """The report as Markdown, its pictures as files beside it."""

    def line(cells):
        return "| " + " | ".join(plain(cell) for cell in cells) + " |"

    def plain(text):
        """As Markdown shows it: on one line, without HTML, links, pictures or code."""
        escaped = html.escape(" ".join(text.split()), quote=False)
        return re.sub(r"([\\`*_\[\]()!|~])", r"\\\1", escaped)

    text = ["# amdim_tf report", ""]
    for title, head, rows in sections(runs):
        text += [f"## {title}", "", line(head), line(["---"] * len(head)), *map(line, rows), ""]
    text += ["## Figures", ""]
    for caption, path in pictures.items():
        text += [f"![{plain(caption)}]({path.name})", ""]
    listed = (f"    {' '.join(command.splitlines())}" for command in commands(runs))
    text += ["## Commands", "", *listed, ""]
    return "\n".join(text)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
table { border-collapse: collapse; margin-bottom: 1.5rem } figure { margin: 1.5rem 0 }
th, td { border: 1px solid #bbb; padding: .25rem .7rem; text-align: left }
th { background: #eee } img { max-width: 100% } pre { overflow-x: auto; background: #f4f4f4;
padding: .7rem }
"""


def page(runs: list[Run], pictures: dict[str, pathlib.Path]) -> str:
    """The report as one HTML page that loads nothing."""

    def row(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = ["<h1>amdim_tf report</h1>"]
    for title, head, rows in sections(runs):
        body.append(f"<h2>{html.escape(title)}</h2><table>{row(head, 'th')}")
        body += [row(cells, "td") for cells in rows] + ["</table>"]
    body.append("<h2>Figures</h2>")
    for caption, path in pictures.items():
        data = base64.b64encode(path.read_bytes()).decode()
        escaped = html.escape(caption)
        body.append(
            f'<figure><img alt="{escaped}" src="data:image/png;base64,{data}">'
            f"<figcaption>{escaped}</figcaption></figure>"
        )
    listed = html.escape("\n".join(commands(runs)))
    body.append(f"<h2>Commands</h2><pre>{listed}</pre>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>amdim_tf report</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body>'
        + "\n".join(body)
        + "</body></html>\n"
    )


def write(runs: list[Run], output: pathlib.Path) -> None:
    """Writes the report and its pictures into a directory."""
    output.mkdir(parents=True, exist_ok=True)
    for name in ("report.md", "report.html"):  # before any picture is drawn
        if (output / name).is_dir():
            raise UserError(
                f"--output_dir: expected to write {output / name}. Received: a directory of that "
                "name. Choose another."
            )
    pictures = draw(runs, output)
    texts = {"report.md": markdown(runs, pictures), "report.html": page(runs, pictures)}
    for name, text in texts.items():  # names of files need not be UTF-8, the report is
        safe_files.write_whole(output / name, text.encode(errors="replace"))


def main(*directories: str) -> None:
    """Reads the runs and writes the report."""
    if not directories:
        raise UserError("expected one model_dir or more beside the flags. Received: none.")
    runs = read_runs([pathlib.Path(directory) for directory in directories])
    if not any(run.evaluations for run in runs):
        raise UserError(
            f"{directories[0]}/evaluation: expected results. Run amdim_tf.evaluate first."
        )
    cli_flags.import_tensorflow_quietly()
    output = pathlib.Path(cli_flags.require("output_dir", "a directory for the report"))
    write(runs, output)
    print(f"Wrote {output / 'report.md'} and {output / 'report.html'}.")


if __name__ == "__main__":
    cli_flags.run(main, words=None)
