"""A ClientApp that does what its message tells it to, faults included: for proving what an engine survives."""

import os
import signal
import time
from collections.abc import Sequence

import torch
from flwr.app import Context, Message, MetricRecord
from flwr.clientapp import ClientApp

from fedloom.clients.protocol.partial_sums import PartialSum

app = ClientApp()


@app.train()  # type: ignore[arg-type]  # one of the faults is to return nothing
def train(message: Message, context: Context) -> Message | None:
    """Answer with the message's content and the worker's process, after the fault (record `fault`, key `kind`)."""
    record = message.content.config_records.get("fault", {})
    for kind in str(record.get("kind", "")).split():
        if kind == "nothing":
            return None
        FAULTS[kind](str(record.get("once", "")))
    message.content["worker"] = MetricRecord({"pid": os.getpid()})
    message.content["echo"] = message.content.array_records["weights"]  # an edit that must reach no neighbour
    return Message(message.content, reply_to=message)


def combine(asked: Sequence[Message], replies: Sequence[Message]) -> tuple[list[Message], list[PartialSum]]:
    """Adds nothing up; fails for a message whose fault says so."""
    for message in asked:
        for kind in str(message.content.config_records.get("fault", {}).get("combine", "")).split():
            FAULTS[kind]("")
    return list(replies), []


def _raise(_: str) -> None:
    raise ValueError("this site has no data")


def _kill(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_once(path: str) -> None:
    if not os.path.exists(path):
        with open(path, "w", encoding="utf-8"):
            _kill(path)


def _hang(_: str) -> None:
    time.sleep(3600)


def _slow(_: str) -> None:
    time.sleep(0.5)


def _late(path: str) -> None:
    """Notes its process, then waits for a writer at the named pipe `path`.gate (nothing in Python is checked meanwhile).

    Then it does something that can be seen.
    """
    with open(f"{path}.begun-{os.getpid()}", "w", encoding="utf-8"):
        pass
    os.close(os.open(f"{path}.gate", os.O_RDONLY))
    with open(path, "w", encoding="utf-8"):
        pass


def _stop_once(path: str) -> None:
    """Like a machine that hangs: nothing of the process runs any more."""
    if not os.path.exists(path):
        with open(path, "w", encoding="utf-8"):
            os.kill(os.getpid(), signal.SIGSTOP)


def _memory(_: str) -> None:
    torch.empty(2**60)


FAULTS = {
    "raise": _raise,
    "kill": _kill,
    "kill_once": _kill_once,
    "hang": _hang,
    "slow": _slow,
    "late": _late,
    "stop_once": _stop_once,
    "memory": _memory,
}
