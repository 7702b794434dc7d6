"""A profile of some steps: written, and readable by TensorBoard's plugin."""

import json

import pytest
from test_faults import _train, images

from amdim_tf.errors import UserError

__all__ = ["images"]  # a fixture


def test_the_profile_tab_has_the_steps(tmp_path, images, capsys):
    _train(tmp_path, images, train_steps=4, profile_steps=(2, 3))
    assert f"profile of steps 2 to 3 below {tmp_path / 'logs'}" in capsys.readouterr().out
    (trace,) = (tmp_path / "logs" / "plugins" / "profile").glob("*/*.xplane.pb")
    assert trace.stat().st_size > 1000
    convert = pytest.importorskip("xprof.convert.raw_to_tool_data")
    data, _ = convert.xspace_to_tool_data([str(trace)], "trace_viewer", {})
    names = {event.get("name") for event in json.loads(data)["traceEvents"]}
    assert any(name and "train_step" in name for name in names), sorted(map(str, names))[:50]


def test_steps_beyond_the_run_are_refused(tmp_path, images):
    with pytest.raises(UserError, match=r"--profile_steps: .* last, 4\. Received: 9,12"):
        _train(tmp_path, images, train_steps=4, profile_steps=(9, 12))


def test_steps_that_are_over_are_refused(tmp_path, images):
    _train(tmp_path, images, train_steps=2)
    with pytest.raises(UserError, match=r"--profile_steps: expected steps after 2, .* 2,3"):
        _train(tmp_path, images, train_steps=4, profile_steps=(2, 3))
