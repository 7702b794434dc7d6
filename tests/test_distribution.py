"""The same numbers on one device, on several, on several machines, and in pieces."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import tensorflow as tf
from pictures import picture, write_tree

from amdim_tf import clusters, distribution, microbatches, policies, sources, workers
from amdim_tf import config as config_lib
from amdim_tf.errors import Interrupted, UserError
from amdim_tf.signals import StopSignals

ROOT = pathlib.Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))
from benchmarks import workers as cluster  # noqa: E402

SYNCHRONIZED = {"batch_norm": "synchronized"}
BAD_ADDRESSES = (
    ":", "a", "a,b:1", "\0:1", "a:b", "a:0", "a:99999", "a b:1", "http://a:1", ":1", "a..b:1",
    70 * "a" + ":1",
)  # fmt: skip

# Process -> rows that share its devices: name -> the row it must equal, settings, and what else
# distributed_steps.py takes. Batch norm uses the statistics of the whole batch, of its halves (8
# images) or of its quarters (4 images), and each row is compared with plain differentiation on one
# device, with statistics of the same parts.
PROCESSES = {
    "plain": [
        ("whole", None, {}, {"parts": 1}),
        ("halves", None, {}, {"parts": 2}),
        ("quarters", None, {}, {"parts": 4}),
    ],
    "one": [
        ("one_device", "whole", {}),
        ("blocks_of_5", "whole", {"nce_block": "5"}),
        ("microbatch_8", "halves", {"microbatch": 8}),
        ("microbatch_4", "quarters", {"microbatch": 5, "nce_block": "3"}),
        ("xla", "whole", {"xla": "on"}),
        ("xla_microbatch_8", "halves", {"xla": "on", "microbatch": 8}),
    ],
    "two": [
        ("two_synchronized", "whole", {"replicas": 2, **SYNCHRONIZED}),
        ("two", "halves", {"replicas": 2}),
        ("two_xla_blocks", "halves", {"replicas": 2, "xla": "on", "nce_block": "3"}),
        ("two_microbatch_4", "quarters", {"replicas": 2, "microbatch": 4}),
    ],
    "four": [("four_synchronized", "whole", {"replicas": 4, **SYNCHRONIZED})],
    "workers": [("two_workers", "whole", SYNCHRONIZED)],
    "workers_of_two": [("two_workers_of_two", "quarters", {"replicas": 2})],
}


def _with_mixtures(row):
    """The same row for a mixture model."""
    name, expected, settings, *more = row
    expected = expected and f"mixture_{expected}"
    return f"mixture_{name}", expected, {**settings, "mixture_components": 2}, *more


# With two replicas, mixtures meet the one setting that differs most.
PROCESSES = {
    process: [*rows, *map(_with_mixtures, rows[:1] if process == "two" else rows)]
    for process, rows in PROCESSES.items()
}
ALL_TASKS = {"tasks": ["1to5", "1to7", "5to5"]}
PROCESSES["two"].append(("two_zero", None, {"replicas": 2, **ALL_TASKS}, {"zero": True}))
PROCESSES["half_two"] = [
    ("two_bfloat16", None, {"replicas": 2, "precision": "mixed_bfloat16", **SYNCHRONIZED})
]
PROCESSES["half"] = [
    ("bfloat16", None, {"precision": "mixed_bfloat16"}),
    ("float16", None, {"precision": "mixed_float16"}),
    ("float16_overflow", None, {"precision": "mixed_float16"}, {"scale": 2.0**60}),
]
TABLE = {row[0]: row[1] for rows in PROCESSES.values() for row in rows if row[1]}
# Half precision without oneDNN, whose kernels for it exist only on some processors.
HALF = {"TF_ENABLE_ONEDNN_OPTS": "0"}
# A few steps are not worth much compilation.
QUICK_XLA = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
}


def environments(workers, more=None):
    """The environment of each worker; of one process alone if there is one."""
    return [{**os.environ, **(more or {}), **one} for one in cluster.environments(workers)]


def _errors_of(words, workers, more):
    """What the processes of a cluster, or one alone, said if one of them failed; else nothing."""
    processes = [
        subprocess.Popen(
            words, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for environment in environments(workers, more)
    ]
    ends = [process.communicate(timeout=600)[1] for process in processes]
    if any(process.returncode for process in processes):
        return "\n".join(end[-3000:] for end in ends)
    return ""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Row -> what each of its processes ended with."""
    directory = tmp_path_factory.mktemp("steps")
    for name, rows in PROCESSES.items():
        listed = [
            {"name": row, "settings": settings, **(more[0] if more else {})}
            for row, _, settings, *more in rows
        ]
        script = [sys.executable, ROOT / "tests" / "distributed_steps.py", directory]
        workers = 2 if name.startswith("workers") else 1
        words = [*map(str, script), json.dumps(listed)]
        errors = _errors_of(words, workers, HALF if "half" in name else QUICK_XLA)
        if errors and workers > 1:  # where the system is slow, TensorFlow may take one for lost
            warnings.warn(f"{name}: started again after {errors[-1000:]}", stacklevel=1)
            errors = _errors_of(words, workers, QUICK_XLA)
        assert not errors, errors
    found: dict[str, list] = {}
    for path in sorted(directory.glob("*.npz")):
        with np.load(path) as arrays:
            found.setdefault(path.name.split(".")[0], []).append(dict(arrays))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE)
def test_weights_and_losses_after_three_steps(results, row):
    (expected,) = results[TABLE[row]]
    assert len(results[row]) == (2 if "workers" in row else 1)
    assert np.ptp(expected["log/loss"]) > 1e-2  # the steps do something
    for actual in results[row]:
        assert actual.keys() >= expected.keys()
        for name, value in expected.items():
            # Not weights but embeddings: sums over many weights of which each is that close.
            limit = 1e-4 if name.endswith("mixture/negatives") else 1e-5
            np.testing.assert_allclose(actual[name], value, atol=limit, rtol=limit, err_msg=name)


@pytest.mark.slow
def test_parts_of_the_batch_norm_matter(results):
    """Else the table would not show that statistics are where they belong."""
    for one, other in (("whole", "halves"), ("halves", "quarters")):
        weights = [results[name][0]["amdim/encoder/stem/kernel"] for name in (one, other)]
        assert np.abs(weights[0] - weights[1]).max() > 1e-4


@pytest.mark.slow
def test_negatives_come_from_all_replicas(results):
    """With scores of zero, p is 1 / (1 + negatives); 2 replicas have 8 images each."""
    (logs,) = results["two_zero"]
    for task, locations in (("1to5", 25), ("1to7", 49), ("5to5", 25)):
        negatives = np.expm1(logs[f"log/loss_{task}"][0])
        np.testing.assert_allclose(negatives, (16 - 1) * locations, rtol=1e-4)


@pytest.mark.slow
def test_half_precision_stays_close(results):
    (expected,) = results["whole"]
    for name, tolerance in (("bfloat16", 0.05), ("two_bfloat16", 0.05), ("float16", 0.01)):
        (actual,) = results[name]
        np.testing.assert_allclose(actual["log/loss"], expected["log/loss"], rtol=tolerance)
        assert actual["amdim/encoder/stem/kernel"].dtype == np.float32
    np.testing.assert_array_equal(results["float16"][0]["log/loss_scale"], 2.0**15)


@pytest.mark.slow
def test_an_overflow_skips_the_step_and_halves_the_scale(results):
    (logs,) = results["float16_overflow"]
    np.testing.assert_array_equal(logs["log/loss_scale"], 2.0 ** np.array([60, 59, 58]))
    np.testing.assert_array_equal(logs["log/overflow"], 1)
    np.testing.assert_array_equal(logs["log/nonfinite"], 0)
    weights = [name.removeprefix("first/") for name in logs if name.startswith("first/")]
    for name in weights:
        np.testing.assert_array_equal(logs[name], logs[f"first/{name}"], err_msg=name)


@pytest.mark.parametrize(
    "settings, replicas, words",
    [
        ({"batch_size": 30}, 4, "a multiple of 4, the 4 replicas; the nearest: 28 and 32"),
        ({"batch_size": 3}, 4, "the nearest: 4. Received: 3"),
        ({"batch_size": 44, "microbatch": 8}, 2, "--microbatch=8, or one with a divisor near it; "),
        ({"batch_size": 44, "microbatch": 8}, 2, "the nearest: 32 and 48. Received: 44"),
        ({"batch_size": 127, "microbatch": 32}, 1, "the nearest: 96 and 128. Received: 127"),
        ({"batch_size": 7, "microbatch": 2}, 1, "the nearest: 6 and 8. Received: 7"),
    ],
)
def test_a_batch_that_does_not_divide(settings, replicas, words):
    with pytest.raises(UserError, match="--batch_size") as error:
        distribution.check_batch(config_lib.make(settings), replicas)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "images, most, size", [(1008, 32, 28), (1008, 16, 16), (12, 32, 12), (40, 8, 8), (20, 8, 5)]
)
def test_microbatches_are_equal_parts(images, most, size):
    assert microbatches.size_of(images, most) == size
    settings = {"batch_size": 2 * images, "microbatch": most}
    distribution.check_batch(config_lib.make(settings), replicas=2)


def test_a_cluster_of_one_is_one_device(monkeypatch):
    cluster = {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    assert _resolve().one_device


@pytest.mark.parametrize("settings", [{"strategy": "one_device"}, {"strategy": "mirrored"}])
def test_workers_are_not_left_out_in_silence(monkeypatch, settings):
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(UserError, match="--strategy: expected multi_worker, as TF_CONFIG names 2"):
        _resolve(**settings)


@pytest.mark.parametrize(
    "text, named",
    [
        ("", "nothing"),
        ("{", "{"),
        ("[" * 100_000, "["),
        ("[]", "[]"),
        ('{"cluster": {"worker": ["a:1"]}}', "a:1"),
        ('{"cluster": {"worker": "a:1"}, "task": {"type": "worker", "index": 0}}', "the cluster"),
        ('{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 0}}', "the cluster"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}', "the task"),
    ],
)
def test_a_bad_cluster_is_named(text, named):
    with pytest.raises(UserError, match="TF_CONFIG") as error:
        clusters.parse(text)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "cluster, index, named",
    [
        ({"worker": ["a:1", "b:1"]}, True, "the task"),
        ({"worker": ["a:1", "a:1"]}, 0, "twice"),
        ({"worker": ["c:1"], "chief": ["a:1", "b:1"]}, 0, "2 chiefs"),
        ({"worker": ["c:1", "d:1"], "chief": []}, 0, "0 chiefs"),
        *(({"worker": [address]}, 0, "the cluster") for address in BAD_ADDRESSES),
    ],
)
def test_bad_addresses_are_named(cluster, index, named):
    document = {"cluster": cluster, "task": {"type": "worker", "index": index}}
    with pytest.raises(UserError, match=f"TF_CONFIG: .*Received: .*{named}"):
        clusters.parse(json.dumps(document))


def test_a_cluster_with_a_chief():
    cluster = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    text = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
    assert clusters.parse(text) == (("a:1", "b:1", "c:1"), 2)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6")
def test_workers_are_seen_at_both_kinds_of_addresses():
    (port,) = cluster.free_ports(1)
    with clusters._Reception(f"[::1]:{port}", "words") as reception:
        for host in ("127.0.0.1", "[::1]"):
            assert clusters._call(f"{host}:{port}", f"of {host}") == "words"
    assert reception.callers == ["of 127.0.0.1", "of [::1]"]
    assert clusters._call(f"127.0.0.1:{port}", "too late") is None


def test_workers_meet_or_are_told_who_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(clusters, "_FIRST_WAIT", 0.0)
    addresses = tuple(f"127.0.0.1:{port}" for port in cluster.free_ports(2))
    both = [clusters.Cluster(addresses, worker) for worker in (0, 1)]
    stop = StopSignals()
    first = threading.Thread(target=clusters.meet, args=(both[0], 1, stop))
    first.start()
    while "is waiting for" not in (told := capsys.readouterr().err):
        time.sleep(0.01)
    assert f"worker 0, {addresses[0]}, is waiting for {addresses[1]}" in told
    clusters.meet(both[1], 1, stop)
    first.join(timeout=10)
    assert not first.is_alive()
    stop.received = "SIGTERM"
    with pytest.raises(Interrupted, match=f"SIGTERM while waiting for {addresses[1]}"):
        clusters.meet(both[0], 1, stop)
    with (
        clusters._listening(addresses[0]),
        pytest.raises(UserError, match="expected a free port for this worker"),
    ):
        clusters.meet(both[0], 1, stop)


def test_what_answers_may_be_something_else():
    """Another service, which may still make room, and addresses that are not another worker's."""
    first, second = cluster.free_ports(2)
    stop = StopSignals()
    stop.received = "SIGTERM"
    pair = clusters.Cluster((f"localhost:{first}", f"localhost:{second}"), 0)
    with (
        clusters._Reception(pair.addresses[1], "HTTP/1.0 400 Bad Request"),
        pytest.raises(Interrupted, match=rf"localhost:{second} \(where something else answers\)"),
    ):
        clusters.meet(pair, 1, stop)
    twice = clusters.Cluster((f"localhost:{first}", f"127.0.0.1:{first}"), 0)
    with pytest.raises(UserError, match="two addresses of the same"):
        clusters.meet(twice, 1, stop)
    for words, named in (
        (clusters._WORDS.format(2, 3, 1), r"worker 0 of 2 with 1 devices; and .* worker 2 of 3"),
        (clusters._WORDS.format(1, 2, 4), "workers .* with as many devices each"),
    ):
        with (
            clusters._Reception(pair.addresses[1], words),
            pytest.raises(UserError, match=named),
        ):
            clusters.meet(pair, 1, stop)
    three = clusters.Cluster((*pair.addresses, "localhost:1"), 0)
    with (
        clusters._Reception(pair.addresses[1], clusters._WORDS.format(2, 3, 1)),
        pytest.raises(UserError, match=f"expected worker 1 at localhost:{second}"),
    ):
        clusters.meet(three, 1, stop)


def test_what_answers_may_be_slow():
    """One letter at a time does not keep a worker from its signals."""
    (port,) = cluster.free_ports(1)
    ended = threading.Event()

    def drip(listening):
        connection, _ = listening.accept()
        while not ended.wait(0.1):
            connection.sendall(b"a")
        connection.close()

    with clusters._listening(f"localhost:{port}") as listening:
        dripping = threading.Thread(target=drip, args=(listening,))
        dripping.start()
        began = time.monotonic()
        assert clusters._call(f"localhost:{port}", "words") == ""
        assert time.monotonic() - began < 2 * clusters._TALK_SECONDS
        ended.set()
        dripping.join()


@pytest.mark.slow
def test_a_worker_that_is_lost_after_they_met(tmp_path):
    """TensorFlow would wait for it for an hour."""
    first, second = cluster.free_ports(2)
    addresses = [f"localhost:{first}", f"localhost:{second}"]
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
    code = """if True:
        from amdim_tf import cli_flags, config
        cli_flags.import_tensorflow_quietly()
        from amdim_tf import distribution
        distribution._CONNECT_SECONDS = 3.0
        distribution.resolve(config.make({"batch_size": 8}))
    """
    environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
    with clusters._Reception(addresses[1], clusters._WORDS.format(1, 2, 1)):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True,
            cwd=ROOT, timeout=200,
        )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: TF_CONFIG: ") and f"workers {', '.join(addresses)}" in line


def test_workers_agree_on_images_and_policy(tmp_path):
    """By names within their own directories, which may differ."""

    def facts(directory, names, policy=None):
        write_tree(tmp_path / directory, {name: picture(150, 150) for name in names})
        settings = {"dataset": "folder", "data_dir": str(tmp_path / directory)}
        config = config_lib.make(settings)
        return workers.facts(sources.load(config.data, "train"), config, policy)

    here = facts("a", ["train/x/1.jpg", "train/y/2.jpg"])
    assert facts("b", ["train/x/1.jpg", "train/y/2.jpg"]) == here
    assert facts("c", ["train/x/1.jpg", "train/y/3.jpg"]) != here
    assert facts("a", [], policies.load("randaugment(2,9)")) != here


def test_a_directory_that_workers_do_not_share(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_SHARED_SECONDS", 0.0)
    with pytest.raises(UserError, match="--model_dir: expected a directory that all workers share"):
        workers.wait_for_config(tmp_path, StopSignals())
    stop = StopSignals()
    stop.received = "SIGTERM"
    with pytest.raises(Interrupted, match="SIGTERM while waiting for "):
        workers.wait_for_config(tmp_path, stop)


def test_signals_wait_for_a_library_that_takes_them():
    """Real signals, in a process of its own whose threads have begun as those of a program."""
    script = (
        "import os, signal\n"
        "from amdim_tf import cli_flags, signals\n"
        "cli_flags.import_tensorflow_quietly()\n"
        "with signals.StopSignals() as stop:\n"
        "    with stop.held_back():\n"
        "        signal.signal(signal.SIGTERM, lambda *_: print('lost'))\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        assert not stop.received\n"
        "    print(stop.received)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "SIGTERM\n", done


@pytest.mark.parametrize(
    "settings, replicas, flag",
    [({"microbatch": 1}, 2, "--microbatch"), ({}, 16, "--batch_size"), ({}, 8, "")],
)
def test_statistics_need_two_images(settings, replicas, flag):
    config = config_lib.make({"batch_size": 16, **settings})
    if not flag:
        distribution.check_batch(config, replicas)
        return
    with pytest.raises(UserError, match=f"{flag}: expected at least 2 images"):
        distribution.check_batch(config, replicas)
    synchronized = config_lib.make({"batch_size": 16, "batch_norm": "synchronized"})
    distribution.check_batch(synchronized, 16)


def _resolve(**settings):
    return distribution.resolve(config_lib.make(settings))


def test_one_device_is_what_this_process_has():
    devices = _resolve()
    assert (devices.replicas, devices.worker, devices.workers) == (1, 0, 1)
    assert not devices.whole_step and not devices.islands
    assert _resolve(xla="on").whole_step
    with pytest.raises(UserError, match="--replicas: expected 0 with --strategy=one_device"):
        _resolve(strategy="one_device", replicas=2)


def test_a_tpu_is_asked_for_by_name(monkeypatch):
    """With stand-ins for the resolver and the strategy: there is no TPU here."""
    asked = []

    class Strategy(tf.distribute.TPUStrategy):
        def __init__(self, resolver):
            asked.append(resolver)

        num_replicas_in_sync = 8

    monkeypatch.setattr(
        tf.distribute.cluster_resolver, "TPUClusterResolver", lambda tpu: f"resolver of {tpu}"
    )
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", asked.append)
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", asked.append)
    monkeypatch.setattr(tf.distribute, "TPUStrategy", Strategy)
    devices = _resolve(strategy="tpu", tpu="mine", batch_size=64)
    assert asked == ["resolver of mine"] * 3
    assert devices.replicas == 8 and not devices.islands and not devices.whole_step
    monkeypatch.setattr(Strategy, "num_replicas_in_sync", 1)
    assert not devices.one_device  # its strategy has to run the step all the same
    monkeypatch.setattr(Strategy, "num_replicas_in_sync", 8)
    with pytest.raises(UserError, match="a multiple of 8"):
        _resolve(strategy="tpu", batch_size=60)


def test_no_tpu_gets_one_line():
    with pytest.raises(UserError, match="--tpu: expected a TPU"):
        _resolve(strategy="tpu", tpu="local")
