"""The Beam pipeline: the same features as the local extraction, with several workers."""

import re
import subprocess
import sys

import numpy as np
import pytest
from exports import all_bytes, read_npz, small_files, write_export
from pictures import encoded, picture, write_tree
from test_train import ROOT

from amdim_tf import extraction
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
