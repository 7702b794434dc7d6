"""The Beam pipeline: the same features as the local extraction, with several workers."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from exports import all_bytes, read_npz, small_files, write_export
from pictures import encoded, picture, write_tree
from test_train import ROOT

from amdim_tf import extraction, feature_shards
from amdim_tf.errors import UserError
from amdim_tf.extraction import Request

pytest.importorskip("apache_beam", reason="needs requirements-beam.txt")


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return write_export(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Test images of two sizes, and a shard's worth of bad ones."""
    files = small_files(24)
    files |= {f"test/dog/9{number}.jpg": b"no image" for number in range(4)}
    files["test/cat/large.png"] = encoded(picture(60, 80), "PNG")
    return write_tree(tmp_path_factory.mktemp("data"), files)


def _request(export, data, output):
    return Request(
        str(export), "folder", str(data), "test", str(output), batch_size=3, shard_size=4
    )


def _run_program(request, *options):
    return subprocess.run(
        [
            sys.executable, "-m", "amdim_tf.extract", f"--saved_model={request.saved_model}",
            "--dataset=folder", f"--data_dir={request.data_dir}", "--split=test",
            f"--output={request.output}", "--batch_size=3", "--shard_size=4",
            "--runner=beam", "--", *options,
        ],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip


def test_two_processes_give_the_features_of_one(export, data, tmp_path):
    local = _request(export, data, tmp_path / "local")
    extraction.extract(local)
    request = _request(export, data, tmp_path / "beam")
    done = _run_program(request, "--direct_num_workers=2", "--direct_running_mode=multi_processing")
    assert done.returncode == 0, done.stderr
    here, there = read_npz(tmp_path / "local"), read_npz(tmp_path / "beam")
    assert len(here["path"]) == 25
    for name in ("path", "index", "label"):
        np.testing.assert_array_equal(there[name], here[name])
    np.testing.assert_allclose(there["f1"], here["f1"], rtol=0, atol=1e-5)
    files = [all_bytes(tmp_path / name) for name in ("local", "beam")]
    for name in ("manifest.json", "skipped_images.txt"):
        assert files[0][name] == files[1][name]
    assert files[0].keys() == files[1].keys()
    counted = re.search(
        r"Beam counted: images 25, undecodable 4, batches \d+, model loads (\d)", done.stdout
    )
    assert counted and int(counted[1]) <= 2, done.stdout


@pytest.mark.parametrize(
    "options, received",
    [
        (["--runner=Nonsense"], "Unexpected pipeline runner: Nonsense"),
        (["--runner=no.such.Runner"], "no"),
        (["--direct_num_workers=x"], "--direct_num_workers: invalid int value: 'x'"),
        (["--direct_running_mode=foo"], "--direct_running_mode: invalid choice: 'foo'"),
        (["--nonsense=3"], "unknown --nonsense=3"),
        (["stray"], "unknown stray"),
    ],
)
def test_options_that_are_refused(options, received):
    from amdim_tf import beam_extraction

    with pytest.raises(UserError, match="--runner=beam: expected Beam's own options") as error:
        beam_extraction.new_pipeline(options)
    assert received in str(error.value) and "\n" not in str(error.value)


def test_mistakes_get_one_line(tmp_path):
    done = _run_program(_request(tmp_path, tmp_path, tmp_path / "f"), "--direct_num_workers=x")
    *notes, line = done.stderr.splitlines()
    assert done.returncode == 2 and len(notes) <= 1, done.stderr  # Beam may warn when imported
    assert line.startswith("error: --runner=beam: expected Beam's own options")


def test_a_full_disk_is_one_line(export, data, tmp_path, monkeypatch):
    from amdim_tf import beam_extraction

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(feature_shards, "write", full)
    with pytest.raises(UserError, match="No space left on device") as error:
        extraction.extract(
            _request(export, data, tmp_path / "f"), lambda job: beam_extraction.run(job, [])
        )
    assert "\n" not in str(error.value) and "Traceback" not in str(error.value)
    assert "--runner=beam: expected a pipeline that ends well. Received: OSError" in str(
        error.value
    )


def test_a_failed_pipeline_has_no_traceback(export, data, tmp_path):
    request = _request(export, data, tmp_path / "f")
    with extraction.prepared(request) as job:
        rows_file = job.directory.shard_path(2).name + feature_shards.ROWS
    (tmp_path / "f" / rows_file).mkdir()  # in the way of a file
    done = _run_program(request)
    *notes, line = done.stderr.splitlines()
    assert done.returncode == 2 and len(notes) <= 1, done.stderr  # Beam may warn when imported
    assert line.startswith("error: --runner=beam: expected a pipeline that ends well. Received: ")
    assert rows_file in line


@pytest.mark.parametrize("wrapping", ["", "RuntimeError: "])
def test_the_reason_is_what_a_worker_raised(wrapping):
    from amdim_tf import beam_extraction

    text = f"Traceback:\n  File\n{wrapping}amdim_tf.errors.UserError: --flag: expected it.\n"
    assert beam_extraction._reason(text) == "--flag: expected it"


def test_workers_refuse_another_model_than_the_manifests(export, data, tmp_path):
    from amdim_tf import beam_extraction

    moved = shutil.copytree(export, tmp_path / "model")

    def run(job):
        weights = next((moved / "variables").glob("*.data*"))
        weights.write_bytes(weights.read_bytes() + b"\0")
        beam_extraction.run(job, [])

    with pytest.raises(UserError, match="--saved_model: expected the same export") as error:
        extraction.extract(_request(moved, data, tmp_path / "f"), run)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "f" / "manifest.json").exists()


def test_it_goes_on_with_what_a_local_run_began(export, data, tmp_path):
    from amdim_tf import beam_extraction

    extraction.extract(_request(export, data, tmp_path / "whole"))
    request = _request(export, data, tmp_path / "f")
    with extraction.prepared(request) as job:
        extraction.run_here(job)
    written = sorted((tmp_path / "f").glob("features-*"))
    written[1].unlink()
    kept = written[0].stat().st_mtime_ns

    def run(job):
        beam_extraction.run(job, ["--runner=DirectRunner"])

    extraction.extract(request, run)
    assert written[0].stat().st_mtime_ns == kept
    here, there = read_npz(tmp_path / "whole"), read_npz(tmp_path / "f")
    np.testing.assert_array_equal(there["path"], here["path"])
    np.testing.assert_allclose(there["f1"], here["f1"], rtol=0, atol=1e-5)
    assert all_bytes(tmp_path / "f").keys() == all_bytes(tmp_path / "whole").keys()
