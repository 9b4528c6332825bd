"""Starts Ray on this machine: on loopback only, apart from this process's signals, and without what no run uses."""

import contextlib
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray._private import node, ray_constants, services

from fedloom.conf import machine

# Ray reads this when it starts or joins: it leaves CUDA_VISIBLE_DEVICES unchanged, without a warning.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

_starting = threading.Event()
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=lambda: os.setpgrp() if _starting.is_set() else None)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Start Ray's processes of this context in their own process groups: a signal to ours (timeout, a shell) misses them.

    If Ray's processes died first, Ray would end this process before it can clean up.
    """
    _starting.set()
    try:
        yield
    finally:
        _starting.clear()


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM after this context: Ray's own abort without cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def begin(workers: int, num_cpus: float) -> None:
    """Start Ray on this machine with room for the workers. `num_cpus`: CPUs of each."""
    cores = max(machine.cores(), math.ceil(workers * num_cpus))
    with own_signals(), apart(), lean(), loopback():
        ray.init("local", num_cpus=cores, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)


@contextlib.contextmanager
def lean() -> Iterator[None]:
    """Make a Ray that starts in this context leave out dashboard, autoscaler and log reader, which no run uses.

    They are programs in Python, which `ray.init` starts and waits for even if they have nothing to do: seconds of a run.
    """
    unused: list[tuple[Any, str, Callable[..., Any]]] = [
        (services, "start_api_server", lambda *_, **__: ("", None)),
        (node.Node, "start_monitor", lambda _: None),
        (node.Node, "start_log_monitor", lambda _: None),
    ]
    with contextlib.ExitStack() as undo:
        for owner, name, nothing in unused:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, nothing)
        yield


@contextlib.contextmanager
def loopback() -> Iterator[None]:
    """Make a Ray that starts in this context listen on 127.0.0.1 only; on Linux its default is all interfaces."""
    before = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR)
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before[0]
        if before[1] is None:
            del os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR]
        else:
            os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = before[1]
