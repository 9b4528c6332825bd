"""Secure aggregation among liars: hostile sites as the server meets them, and a hostile server as a site sees it."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message

from fedloom.clients.app import app
from fedloom.clients.protocol.messages import (
    BLAMED,
    COMMITMENTS,
    MASKED,
    SECURE_CONFIRM,
    SECURE_KEYS,
    SECURE_SHARES,
    SECURE_UNMASK,
    SITE,
    SUMMED_BEFORE,
    TRAIN,
    read_order,
    to_arrays,
    to_states,
)
from fedloom.conf.errors import FailedError
from fedloom.fusion.state import State
from fedloom.server.ledger.slots import Slots
from tests.server.masked import (
    FOUR,
    MASKS,
    ONE,
    SITES,
    TWO,
    Spoiled,
    changed,
    configured,
    gone,
    held,
    killed,
    others,
    run,
    sum_of,
)
from tests.server.runs import method_of

ZEROS = torch.zeros(128, dtype=torch.uint8)


def wrong(state: State) -> State:
    return {name: torch.flip(tensor, [0]) + 1 for name, tensor in state.items()}


def test_wrong_shares_are_found_out(tmp_path: Path) -> None:
    config = configured(tmp_path, MASKS[1], "rounds=1")
    run(config, Spoiled(changed(SECURE_UNMASK, wrong), [SECURE_UNMASK]))
    assert sum_of(config) == held(config, others())


@pytest.mark.parametrize(
    ("stage", "record", "change"),
    [
        (SECURE_KEYS, SECURE_KEYS, lambda state: {"keys": state["keys"][:127]}),
        (SECURE_KEYS, SECURE_KEYS, lambda state: {}),
        (SECURE_KEYS, SECURE_KEYS, lambda state: {"keys": state["keys"].double()}),
        (SECURE_KEYS, SECURE_KEYS, lambda state: {"keys": state["keys"] * (torch.arange(128) >= 32)}),
        (SECURE_KEYS, SECURE_KEYS, lambda state: {"keys": state["keys"] * (torch.arange(128) // 32 != 1)}),
        (SECURE_SHARES, SECURE_SHARES, lambda state: {}),
        (SECURE_SHARES, SECURE_SHARES, lambda state: {name: torch.zeros(300, dtype=torch.uint8) for name in state}),
        (TRAIN, SITE, lambda state: {MASKED: state[MASKED][1:]}),
        (TRAIN, SITE, lambda state: {MASKED: state[MASKED].double()}),
        (TRAIN, SITE, lambda state: {**state, "more": state[MASKED]}),
    ],
)  # fmt: skip
def test_what_cannot_be_read_drops_its_site_alone(tmp_path: Path, stage: str, record: str, change: Any) -> None:
    config = configured(tmp_path, MASKS[1], "rounds=1")
    recorder = run(config, Spoiled(changed(record, change), [stage]))
    assert list(recorder.records[0]["dropped"]) == [ONE] and recorder.records[0]["replies"] == SITES - 1


def test_what_is_not_a_contribution_is_seen_in_the_sum(tmp_path: Path) -> None:
    config = configured(tmp_path, MASKS[1], "rounds=1")
    with pytest.raises(
        FailedError,
        match=r"is beyond twice federation.largest_weight \(20000\): a site sent something other than a contribution",
    ):
        run(config, Spoiled(changed(SITE, lambda state: {MASKED: state[MASKED] * 3}), [TRAIN]))
    with method_of(config) as method:
        assert method.unlearning().last_round() == 0


# A hostile server, as a site sees it


def asked_again(tmp_path: Path, kind: str, change: Callable[[Message], None] = lambda message: None) -> list[str]:
    """What sites say when the server sends its questions of a kind once more, changed."""
    said: list[str] = []

    class Twice(Spoiled):
        def __call__(self, message: Message, context: Context) -> Message:
            reply = super().__call__(message, context)
            if message.metadata.message_type != "query" and read_order(message.content).kind == kind:
                change(message)
                again = app(message, context)
                said.append(str(again.error.reason) if again.has_error() else "answered")
            return reply

    run(configured(tmp_path, MASKS[1], "rounds=1"), Twice())
    return said


def turned(message: Message) -> None:
    """Those that count are said to have dropped out, but for one."""
    counts = to_states(message.content)[SECURE_CONFIRM]
    message.content[SECURE_CONFIRM] = to_arrays({name: one * (name == ONE) for name, one in counts.items()})


def test_a_site_answers_once(tmp_path: Path) -> None:
    assert all("this attempt's contribution is already sent" in message for message in asked_again(tmp_path / "a", TRAIN))
    assert all("cannot be removed now" in message for message in asked_again(tmp_path / "b", SECURE_UNMASK))
    assert all(
        "another list" in message or "of this attempt" in message
        for message in asked_again(tmp_path / "c", SECURE_CONFIRM, turned)
    )
    assert all("secrets are already shared" in message for message in asked_again(tmp_path / "d", SECURE_SHARES))


@pytest.mark.parametrize(
    ("stage", "record", "change", "expected"),
    [
        (SECURE_SHARES, SECURE_KEYS, lambda keys: dict.fromkeys(keys, keys[ONE]), "wrong keys for this site|the same keys"),
        (SECURE_SHARES, SECURE_KEYS, lambda keys: {**keys, TWO: keys[ONE]}, "have the same keys|wrong keys for this site"),
        (SECURE_SHARES, SECURE_KEYS, lambda keys: dict.fromkeys(keys, ZEROS), "wrong keys for this site"),
        (SECURE_SHARES, SECURE_KEYS, lambda keys: {**keys, "../x": keys[ONE]}, "cannot be read"),
        (TRAIN, SECURE_SHARES, lambda shares: dict(list(shares.items())[:2]), "3 sites are too few; at least 4"),
        (TRAIN, SECURE_SHARES, lambda shares: {}, "1 sites are too few"),
        (SECURE_CONFIRM, SECURE_CONFIRM, lambda counts: {n: one * (n < TWO) for n, one in counts.items()},
         "few|not one of this attempt"),
        (SECURE_UNMASK, SECURE_UNMASK, lambda signed: {n: one * 0 for n, one in signed.items()}, "0 sites have signed"),
    ],
)  # fmt: skip
def test_a_site_refuses_to_give_itself_away(tmp_path: Path, stage: str, record: str, change: Any, expected: str) -> None:
    class Server(Spoiled):
        def __call__(self, message: Message, context: Context) -> Message:
            if message.metadata.message_type != "query" and read_order(message.content).kind == stage:
                message.content[record] = to_arrays(change(to_states(message.content)[record]))
            return super().__call__(message, context)

    config, client = configured(tmp_path, MASKS[1], "rounds=1"), Server()
    with pytest.raises(FailedError):
        run(config, client)
    reasons = [str(reply.error.reason) for kind, _, reply in client.replies if kind == stage and reply.has_error()]
    assert len(reasons) == SITES
    assert all(re.search(expected, reason) for reason in reasons), reasons


def test_sites_that_see_different_sites_send_nothing(tmp_path: Path) -> None:
    class Server(Spoiled):
        def __call__(self, message: Message, context: Context) -> Message:
            apart = message.metadata.message_type != "query" and read_order(message.content).kind == SECURE_SHARES
            if apart and read_order(message.content).site == 1:
                keys = to_states(message.content)[SECURE_KEYS]
                message.content[SECURE_KEYS] = to_arrays({name: one for name, one in keys.items() if name != FOUR})
            reply = super().__call__(message, context)
            if apart and read_order(message.content).site == 1:
                sealed = to_states(reply.content)[SECURE_SHARES]
                reply.content[SECURE_SHARES] = to_arrays({**sealed, FOUR: sealed[TWO]})
                committed = to_states(reply.content)[COMMITMENTS]
                longer = {kind: torch.cat([one, one[:32]]) for kind, one in committed.items()}
                reply.content[COMMITMENTS] = to_arrays(longer)
            return reply

    client = Server()
    recorder = run(configured(tmp_path, MASKS[1], "rounds=1"), client)
    kinds = [kind for kind, _, _ in client.replies]
    first = client.replies[: kinds.index(SECURE_KEYS, kinds.index(TRAIN))]  # until the round begins again
    trained = [reply for kind, _, reply in first if kind == TRAIN]
    assert trained and all(reply.has_error() or BLAMED in reply.content.config_records for reply in trained)
    assert (
        f"round 1: other sites report that they cannot use the shares of {ONE}: the round begins again without {ONE}"
        in recorder.messages
    )


def test_of_two_sites_with_the_same_keys_one_takes_part(tmp_path: Path) -> None:
    first: list[State] = []

    def same(state: State) -> State:
        first.append(state)
        return first[0]

    recorder = run(
        configured(tmp_path, MASKS[1], "rounds=1"), Spoiled(changed(SECURE_KEYS, same), [SECURE_KEYS], sites=(1, 2))
    )
    assert recorder.records[0]["dropped"] == {TWO: "its keys are another site's"}


def test_a_round_is_not_told_again_over_other_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is killed between sum and commit; the difference of two sums would be what the missing site gave."""
    config = configured(tmp_path, MASKS[1], "rounds=1", "training.batch=20")  # all images: every draw is the same
    commit = Slots.commit
    with monkeypatch.context() as patch:
        patch.setattr(Slots, "commit", lambda slots, round, record: (killed if round else commit)(slots, round, record))
        with pytest.raises(InterruptedError):
            run(config)
    again = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))
    client = Spoiled(gone, [SECURE_KEYS])
    with pytest.raises(FailedError):
        run(again, client)
    said = [reply.content.config_records for kind, _, reply in client.replies if kind == SECURE_CONFIRM]
    assert len(said) == 3 * (SITES - 1), "each site is asked for three draws of the batch"
    assert all(SUMMED_BEFORE in records for records in said)
    run(again)  # the same sites are there
    assert sum_of(config) == held(config, others())
