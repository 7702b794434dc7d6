"""The workers of a run, as the environment variable TF_CONFIG names them."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from typing import Any, NamedTuple

from amdim_tf.errors import Interrupted, UserError, warn
from amdim_tf.signals import StopSignals, kept_from_threads

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\],\x00-\x1f]+):([0-9]{1,5})")
# Seconds between calls at workers that are missing, and until it is told; after that it is told
# when twice as much time has passed.
_CALL_SECONDS, _FIRST_WAIT = 0.2, 5.0
# Seconds to wait for an answer, and how long one may be.
_TALK_SECONDS, _MOST_LETTERS = 3.0, 100
# What workers say to each other.
_WORDS = "amdim_tf worker {} of {} with {} devices"
_SAID = re.compile(_WORDS.format(*3 * ["([0-9]{1,9})"]))


class Cluster(NamedTuple):
    """What TF_CONFIG says, as far as it matters here."""

    addresses: tuple[str, ...]  # of all workers, the chief first
    worker: int  # which of them this process is


def parse(text: str) -> Cluster:
    """The workers that the value of TF_CONFIG names."""

    def refuse(received) -> UserError:
        return UserError(
            'TF_CONFIG: expected {"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": '
            f'"worker", "index": NUMBER}}}} in the environment. Received: {received}.'
        )

    if not text:
        raise refuse("nothing")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(f"{text[:200]} ({error})") from None
    cluster = document.get("cluster") if isinstance(document, dict) else None
    task = document.get("task") if isinstance(document, dict) else None
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise refuse(text[:200])
    others = set(cluster) - {"chief", "worker"}
    if others or not all(_is_addresses(value) for value in cluster.values()):
        raise refuse(f"the cluster {json.dumps(cluster)[:200]}")
    if len(cluster.get("chief", [""])) != 1:
        raise refuse(f"{len(cluster['chief'])} chiefs")
    places = [(job, number) for job in ("chief", "worker") for number in _numbers(cluster, job)]
    place = (task.get("type"), task.get("index"))
    if place not in places or type(place[1]) is not int:  # true is equal to 1
        raise refuse(f"the task {json.dumps(task)[:200]}, which is none of the cluster's")
    addresses = tuple(cluster[job][number] for job, number in places)
    twice = next((one for one in addresses if addresses.count(one) > 1), None)
    if twice:
        raise refuse(f"the address {twice} twice")
    return Cluster(addresses, places.index(place))


def _is_addresses(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_address, value))


def _is_address(value: Any) -> bool:
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return False
    try:
        match[1].encode("idna")  # as the search for a host does
    except UnicodeError:
        return False
    return 0 < int(match[2]) < 2**16


def _numbers(cluster: dict[str, Any], job: str) -> range:
    return range(len(cluster.get(job, ())))


def meet(cluster: Cluster, devices: int, stop: StopSignals) -> None:
    """Returns when this worker has talked to all others.

    TensorFlow would wait for them too, but without a word, deaf to signals, and for whatever
    answers at their addresses. Each worker listens at its own address and calls at the others'; who
    has talked to all of them goes on to TensorFlow, which then listens there.

    Args:
        cluster: of this worker.
        devices: that this worker has; all need as many.
        stop: what ends the wait.

    Raises:
        UserError: where the port of this worker is taken, or workers do not fit together.
        Interrupted: by a signal.
    """
    own, began = cluster.addresses[cluster.worker], time.monotonic()
    words = _WORDS.format(cluster.worker, len(cluster.addresses), devices)
    missing = {n: one for n, one in enumerate(cluster.addresses) if n != cluster.worker}
    told, seen = _FIRST_WAIT, {}
    with _Reception(own, words) as reception:
        while True:
            for caller in list(reception.callers):
                missing.pop(_worker_of(caller, words), None)
            for number, address in list(missing.items()):
                answer = _call(address, words)
                found = None if answer is None else _worker_of(answer, words)
                if found == number:
                    del missing[number]
                elif found is not None:
                    raise UserError(
                        f"TF_CONFIG: expected worker {number} at {address}. Received: worker "
                        f"{found}. Give all workers the same addresses in the same order."
                    )
                seen[address] = "" if answer is None else " (where something else answers)"
                if stop.received:
                    break
            if not missing:
                return
            waited_for = ", ".join(address + seen.get(address, "") for address in missing.values())
            if stop.received:
                raise Interrupted(f"Stopped by {stop.received} while waiting for {waited_for}.")
            if time.monotonic() - began >= told:
                warn(
                    f"worker {cluster.worker}, {own}, is waiting for {waited_for}, "
                    f"{time.monotonic() - began:.0f} s so far. If one has ended, its own output "
                    "says why."
                )
                told *= 2
            time.sleep(_CALL_SECONDS)


def _worker_of(text: str, own_words: str) -> int | None:
    """Which worker says this; None if it is no worker of ours.

    Raises:
        UserError: where it does not fit this one.
    """
    told, own = (_SAID.fullmatch(one) for one in (text, own_words))
    if told is None:
        return None
    if told[2] != own[2] or told[3] != own[3]:
        raise UserError(
            "TF_CONFIG: expected workers of the same cluster with as many devices each, which "
            f"--replicas sets where there are no GPUs. Received: {own[0]}; and {told[0]}."
        )
    if told[1] == own[1]:
        raise UserError(
            f"TF_CONFIG: expected one worker {own[1]}. Received: two with this index, or two "
            "addresses of the same. Give each worker an index and an address of its own."
        )
    return int(told[1])


class _Reception:
    """Answers whoever calls at this worker's address, and notes what they say; in a thread."""

    def __init__(self, address: str, words: str):
        self.callers: list[str] = []
        self._socket, self._words = _listening(address), words
        self._socket.settimeout(_CALL_SECONDS)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._answer_all, daemon=True)

    def __enter__(self) -> _Reception:
        """Opens."""
        with kept_from_threads():
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        """Closes; the port is free then."""
        self._closed.set()
        self._thread.join()
        self._socket.close()

    def _answer_all(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):  # nobody came, or they left in mid-word
                connection, _ = self._socket.accept()
                with connection:
                    said = _line_from(connection)
                    connection.settimeout(_TALK_SECONDS)
                    connection.sendall(f"{self._words}\n".encode())
                    self.callers.append(said)
                    connection.recv(1)  # who ends a connection keeps its port for a while: not us


def _call(address: str, words: str) -> str | None:
    """What is answered at an address; None where nobody is."""
    host, port = _ADDRESS.fullmatch(address).groups()
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), _TALK_SECONDS)
    except OSError:
        return None
    with connection:
        try:
            connection.sendall(f"{words}\n".encode())
            return _line_from(connection)
        except OSError:
            return ""


def _line_from(connection: socket.socket) -> str:
    """What the other says, if it has ended its line in time."""
    deadline, told = time.monotonic() + _TALK_SECONDS, b""
    while b"\n" not in told and len(told) < _MOST_LETTERS:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = connection.recv(_MOST_LETTERS)
        if not piece:
            break
        told += piece
    return told.partition(b"\n")[0].decode(errors="replace").strip()


def _listening(address: str) -> socket.socket:
    """A socket at this worker's port, on all interfaces, IPv6 too, as TensorFlow opens it."""
    port = int(_ADDRESS.fullmatch(address)[2])
    both = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    try:
        return socket.create_server(("", port), **(both if socket.has_dualstack_ipv6() else {}))
    except OSError as error:
        raise UserError(
            f"TF_CONFIG: expected a free port for this worker, {address}. Received: "
            f"{error.strerror}. End what uses it, or choose another port for all workers."
        ) from None
