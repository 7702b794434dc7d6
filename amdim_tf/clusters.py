"""The workers of a run, as the environment variable TF_CONFIG names them."""

from __future__ import annotations

import json
import re
import socket
import time
from typing import Any, NamedTuple

from amdim_tf.errors import Interrupted, UserError, warn
from amdim_tf.signals import StopSignals

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
# Seconds between calls at workers that are missing, and until it is told; after that it is told
# when twice as much time has passed.
_CALL_SECONDS, _FIRST_WAIT = 0.2, 5.0


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
    if len(cluster.get("chief", ())) > 1:
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
    return match is not None and 0 < int(match[2]) < 2**16


def _numbers(cluster: dict[str, Any], job: str) -> range:
    return range(len(cluster.get(job, ())))


def meet(cluster: Cluster, stop: StopSignals) -> None:
    """Returns when all workers have been seen at their addresses.

    TensorFlow would wait for them too, but without a word, and deaf to signals. Each worker listens
    at its own address and calls at the others'; who has seen all of them goes on to TensorFlow,
    which then listens there.

    Raises:
        UserError: where the port of this worker is taken.
        Interrupted: by a signal.
    """
    own, began = cluster.addresses[cluster.worker], time.monotonic()
    missing = [address for address in cluster.addresses if address != own]
    told = _FIRST_WAIT
    with _listening(own):
        while missing := [address for address in missing if not _answers(address)]:
            if stop.received:
                raise Interrupted(
                    f"Stopped by {stop.received} while waiting for {', '.join(missing)}."
                )
            if time.monotonic() - began >= told:
                warn(f"worker {cluster.worker}, {own}, is waiting for {', '.join(missing)}.")
                told *= 2
            time.sleep(_CALL_SECONDS)


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


def _answers(address: str) -> bool:
    host, port = _ADDRESS.fullmatch(address).groups()
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True
