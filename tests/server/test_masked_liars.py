"""Sites that lie in a masked round are named, and the others' round goes on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedloom.clients.job import Job
from fedloom.clients.privacy.secure_aggregation import site
from fedloom.clients.privacy.secure_aggregation.secrets import Attempt, Secrets
from fedloom.clients.protocol.messages import (
    BLAMED,
    COMMITMENTS,
    SECURE_CONFIRM,
    SECURE_SHARES,
    SECURE_UNMASK,
    SUMMED_BEFORE,
    TRAIN,
    to_arrays,
    to_states,
)
from fedloom.conf import Config
from fedloom.conf.errors import FailedError
from fedloom.fusion.state import State
from tests.server.masked import MASKS, Spoiled, changed, gone, held, killed, run, sum_of
from tests.server.parts import small
from tests.server.runs import method_of

MANY = 16  # more than a search through subsets of shares could bear
LIAR = "site-0003"


def configured(root: Path, *words: str, sites: int = MANY) -> Config:
    return small(root, *MASKS, "baselines=[]", "rounds=2", *words, sites=sites, samples=12)


def zeros(state: State) -> State:
    return {name: torch.zeros_like(one) for name, one in state.items()}


def noise(state: State) -> State:
    return {name: torch.randint_like(one, 256) for name, one in state.items()}


def answered(record: str, content: dict[str, str]) -> Callable[[Message, Message], Message]:
    return lambda message, _: Message(RecordDict({record: ConfigRecord({**content})}), reply_to=message)


@pytest.fixture(scope="module")
def honest_sum(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sum of a run in which nobody lies."""
    config = configured(tmp_path_factory.mktemp("honest"))
    run(config)
    return sum_of(config)


@pytest.mark.parametrize("liars", [(0,), (3,), (0, 3, 7, 15)])
@pytest.mark.parametrize("lie", [zeros, noise])
def test_wrong_shares_have_a_name_and_the_sum_its_bits(
    tmp_path: Path, honest_sum: str, lie: Callable[[State], State], liars: tuple[int, ...]
):
    config = configured(tmp_path)
    recorder = run(config, Spoiled(changed(SECURE_UNMASK, lie), [SECURE_UNMASK], liars))
    assert sum_of(config) == honest_sum
    for record in recorder.records:
        assert set(record["dropped"]) == {f"site-{one:04d}" for one in liars}
        assert all("secret is not the one that" in reason for reason in record["dropped"].values())


@pytest.mark.parametrize(("record", "lie"), [(SECURE_SHARES, noise), (COMMITMENTS, noise), (COMMITMENTS, zeros)])
def test_a_site_whose_shares_no_one_can_use_is_left_out(tmp_path: Path, record: str, lie: Callable[[State], State]):
    config = configured(tmp_path, sites=7)
    recorder = run(config, Spoiled(changed(record, lie), [SECURE_SHARES], [3]))
    assert (
        f"round 1: other sites report that they cannot use the shares of {LIAR}: the round begins again without {LIAR}"
        in recorder.messages
    )
    with method_of(config) as method:
        rounds = [event.body["record"]["masked"]["sites"] for event in method.ledger.events() if event.kind == "round"
                  and event.body["round"]]  # fmt: skip
    assert rounds == [[f"site-{one:04d}" for one in range(7) if one != 3]] * 2


def test_a_site_that_blames_others_is_out_itself(tmp_path: Path):
    config = configured(tmp_path, sites=7)
    recorder = run(config, Spoiled(answered(BLAMED, {"site": "site-0000"}), [TRAIN], [3]))
    assert {name for record in recorder.records for name in record["dropped"]} == {LIAR}
    assert "it cannot use the shares of site-0000" in recorder.records[0]["dropped"][LIAR]


@pytest.mark.parametrize("content", [{"site": LIAR}, {"site": "../x"}, {}, {"site": "site-9999"}])
def test_blame_that_makes_no_sense_is_that_sites_failure(tmp_path: Path, content: dict[str, str]):
    recorder = run(configured(tmp_path, sites=7), Spoiled(answered(BLAMED, content), [TRAIN], [3]))
    assert {name for record in recorder.records for name in record["dropped"]} == {LIAR}


@pytest.mark.parametrize("stage", [SECURE_CONFIRM, SECURE_UNMASK])
def test_a_site_that_spoils_some_shares_and_is_silent_then_does_not_stop_the_others(tmp_path: Path, stage: str):
    """Two cannot use its shares and are out; without the liar too few would be left of those that began."""

    def lies(message: Message, reply: Message) -> Message:
        if stage in message.content.array_records:
            return gone(message, reply)
        if SECURE_SHARES in reply.content.array_records:
            shares = to_states(reply.content)[SECURE_SHARES]
            shares |= {name: torch.randint_like(shares[name], 256) for name in ("site-0000", "site-0001")}
            reply.content[SECURE_SHARES] = to_arrays(shares)
        return reply

    recorder = run(configured(tmp_path, "training.batch=2", sites=7), Spoiled(lies, [SECURE_SHARES, stage], [3]))
    assert [record["replies"] for record in recorder.records] == [6, 6]
    assert any(text.endswith(f"the round begins again without {LIAR}") for text in recorder.messages)


def test_one_site_that_says_so_does_not_have_a_round_restart(tmp_path: Path):
    config, client = configured(tmp_path, sites=7), Spoiled(answered(SUMMED_BEFORE, {}), [SECURE_CONFIRM], [3])
    recorder = run(config, client)
    assert [record["replies"] for record in recorder.records] == [7, 7]
    assert sum(kind == TRAIN for kind, _, _ in client.replies) == 14


@pytest.mark.parametrize("secret", [0, 1])
def test_a_dealer_whose_shares_make_no_secret_does_not_end_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: int
):
    """Each share is the one that it committed to; they are of no polynomial. The second secret is needed if it is gone."""
    real, deals = site.shared_out, site._dealt

    def dealt(job: Job, attempt: Attempt, secrets: Secrets) -> dict[str, State]:
        kinds = iter((0, 1))

        def shared_out(text: bytes, threshold: int, count: int) -> list[bytes]:
            shares = real(text, threshold, count)
            return [bytes(16), *shares[1:]] if (next(kinds), job.site.name) == (secret, LIAR) else shares

        monkeypatch.setattr(site, "shared_out", shared_out)
        return deals(job, attempt, secrets)

    monkeypatch.setattr(site, "_dealt", dealt)
    recorder = run(configured(tmp_path, "training.batch=2", sites=7), Spoiled(gone, [TRAIN] if secret else [], [3]))
    for number in (1, 2):
        start = f"round {number}: the shares that {LIAR} dealt do not make its secret"
        assert f"{start}: the round begins again without {LIAR}" in recorder.messages
    assert [record["replies"] for record in recorder.records] == [6, 6]


def test_what_was_summed_before_a_crash_is_summed_again_with_other_batches(tmp_path: Path):
    """Two sites are gone when the round begins again: the sum is over others, and so is what they train."""
    config = configured(tmp_path, "training.batch=2", sites=7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedloom.server.rounds.server_state.ServerState.commit", killed)
        with pytest.raises(InterruptedError):
            run(config)
    again, client = replace(config, run=replace(config.run, resume=True)), Spoiled(gone, ["secure_keys"], [6])
    found = run(again, client)
    assert [record["replies"] for record in found.records] == [6, 6]
    assert sum(kind == TRAIN for kind, _, _ in client.replies) == 18  # the first round twice


@pytest.mark.parametrize("liars", [(1, 2), (1,)])
def test_liars_do_not_leave_out_one_honest_site_after_the_other(tmp_path: Path, liars: tuple[int, ...]):
    """They blame whoever comes first: what is left must be as many as the protocol needs of those that began."""
    sites = 3 * len(liars)

    def blames(message: Message, reply: Message) -> Message:
        if SECURE_SHARES not in message.content.array_records:
            return reply
        honest = [
            name for name in to_states(message.content)[SECURE_SHARES] if name not in {f"site-{one:04d}" for one in liars}
        ]
        return answered(BLAMED, {"site": min(honest)})(message, reply)

    with pytest.raises(FailedError, match="cannot use the shares of"):
        run(configured(tmp_path, sites=sites), Spoiled(blames, [TRAIN], liars))


def test_what_is_beyond_the_largest_weight_is_cut_before_it_is_kept(tmp_path: Path):
    """Site and server add up the same, also where a contribution was cut."""
    config = configured(tmp_path, "federation.largest_weight=2", "training.rate=3", "rounds=3", sites=4)
    run(config)
    assert sum_of(config) == held(config, [f"site-{one:04d}" for one in range(4)])
