"""Hostile replies: what a site may send instead of its contribution, and why the server must drop each.

They fit the network of width 0.25 for 8 x 8 digits, and sites of 20 images.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedloom.clients.protocol.messages import LOST, METRICS, ROUND, SITE
from fedloom.fusion.state import State

Fault = Callable[[Message], Any]

LAYER, BIAS = "extractor.0.weight", "head.bias"


def changed(record: str, change: Callable[[State], State]) -> Fault:
    """Return a fault that applies `change` to one array record of the reply."""

    def fault(reply: Message) -> Message:
        state = dict(reply.content.array_records[record].to_torch_state_dict())
        reply.content[record] = ArrayRecord(torch_state_dict=change(state))  # type: ignore[arg-type]
        return reply

    return fault


def edited(edit: Callable[[RecordDict], Any]) -> Fault:
    """Return a fault that calls `edit` on the reply's content."""

    def fault(reply: Message) -> Message:
        edit(reply.content)
        return reply

    return fault


def entry(name: str, number: float) -> Callable[[State], State]:
    """Return a change that sets the first entry of one tensor to `number`."""

    def change(state: State) -> State:
        tensor = state[name].clone()
        tensor.view(-1)[0] = number
        return {**state, name: tensor}

    return change


def raising(text: str) -> Fault:
    """Return a fault that raises an error with this text."""

    def fault(reply: Message) -> Message:
        raise RuntimeError(text)

    return fault


def with_record(name: str, record: Any) -> Fault:
    """Return a fault that adds a record to the reply, or replaces it."""
    return edited(lambda content: content.__setitem__(name, record))


def metrics(**values: float | int | list[float]) -> Fault:
    """Return a fault that replaces all metrics."""
    return with_record(METRICS, MetricRecord(dict(values)))


def unreadable(content: bytes) -> Fault:
    """Return a fault that sends `content` in place of an array: bytes that are not one."""
    return edited(
        lambda reply: reply.__setitem__(ROUND, ArrayRecord({BIAS: Array("float32", (10,), "numpy.ndarray", content)}))
    )


def _nothing(reply: Message) -> Any:
    return None


def _lost(content: RecordDict) -> None:
    content.clear()
    content[LOST] = ConfigRecord({"round": "x" * 1000})


RAISES, NOTHING, LOST_STATE = raising("first line\nthe disk is on fire"), _nothing, edited(_lost)
ANSI = "\x1b]0;title\x07\x1b[31mred\x1b[0m\r\x9b2Jgone\u202e"
LONG_NAME = "\x1b[2J" + "x" * 100_000

# By name: the fault, and a part of the reason why the reply is dropped.
REFUSED: dict[str, tuple[Fault, str]] = {
    "raises": (RAISES, "the disk is on fire"),
    "returns nothing": (NOTHING, "the ClientApp returned NoneType, not a Message"),
    "no content": (edited(lambda content: content.clear()), "no record 'metrics'"),
    "no metrics": (edited(lambda content: content.pop(METRICS)), "no record 'metrics'"),
    "no loss": (metrics(samples=5), "with a finite loss"),
    "a loss that is a list": (metrics(loss=[1.0], samples=5), "with a finite loss"),
    "a loss that is not finite": (metrics(loss=float("nan"), samples=5), "with a finite loss"),
    "no samples": (metrics(loss=1.0), "positive number of samples"),
    "samples 0": (metrics(loss=1.0, samples=0), "positive number of samples"),
    "samples -3": (metrics(loss=1.0, samples=-3), "positive number of samples"),
    "samples 2.5": (metrics(loss=1.0, samples=2.5), "positive number of samples"),
    "no contribution": (edited(lambda content: content.pop(SITE)), "no record 'site'"),
    "other names": (
        changed(SITE, lambda state: {name.replace("extractor", "body"): tensor for name, tensor in state.items()}),
        f"record 'site' lacks the tensor '{LAYER}'",
    ),
    "other shapes": (
        changed(ROUND, lambda state: {name: tensor[:1] for name, tensor in state.items()}),
        "record 'round', tensor 'head.bias': shape [1], expected [10]",
    ),
    "a network of other width": (
        changed(SITE, lambda state: {name: tensor.repeat_interleave(2, 0) for name, tensor in state.items()}),
        f"record 'site', tensor '{LAYER}': shape [16, 1, 3, 3], expected [8, 1, 3, 3]",
    ),
    "NaN": (changed(SITE, entry(LAYER, float("nan"))), f"tensor '{LAYER}' has entries that are not finite"),
    "inf": (changed(ROUND, entry(BIAS, float("inf"))), f"tensor '{BIAS}' has entries that are not finite"),
    "too large": (changed(SITE, entry(LAYER, 1e30)), f"tensor '{LAYER}' has an entry of size 1e+30"),
    "plausible poison": (
        changed(SITE, entry(LAYER, 1e9)),
        f"record 'site', tensor '{LAYER}' has an entry of size 1e+09, more than federation.largest_weight=10000",
    ),
    "poison in the shared part": (
        changed(ROUND, entry(BIAS, -2e4)),
        "size 2e+04, more than federation.largest_weight=10000",
    ),
    "a leap": (
        changed(SITE, lambda state: {name: tensor + 60.0 for name, tensor in state.items()}),
        "more than federation.largest_change=1000",
    ),
    "samples 2**30": (metrics(loss=1.0, samples=2**30), "claims 1073741824 samples and has 20 (federation.most_samples"),
    "empty bytes": (unreadable(b""), "arrays cannot be read"),
    "half a zip file": (unreadable(b"PK\x03\x04"), "arrays cannot be read"),
    "a pickle": (unreadable(b"\x80\x04N."), "arrays cannot be read"),
    "what steers a terminal": (raising(ANSI), "red"),
    "a name of 100 kB": (changed(SITE, lambda state: {**state, LONG_NAME: state[LAYER]}), "has an unknown tensor"),
    "a text of 100 kB": (raising("long" * 25_000), "longlong"),
    "a text on lost states": (raising(f"site-0001: its own state is lost: {LOST}"), "its own state is lost: lost"),
}

# These replies count: partial sums come from our own workers, not from replies.
PARTIALS = {
    "thousands of addends": with_record("partial", ConfigRecord({"addends": 5000})),
    "nothing in it": with_record("partial", ConfigRecord({})),
    "not a number": with_record("partial", ConfigRecord({"addends": "lots"})),
    "arrays": with_record("partial", ArrayRecord([np.ones(3)])),
}
