"""Sums under masks: the same bits as sums of what can be read, whoever drops out; forgetting; what the server keeps."""

import shutil
from pathlib import Path

import pytest
import torch

from fedloom.clients.objectives import resolve
from fedloom.clients.protocol.messages import (
    MASKED,
    SECURE_KEYS,
    SECURE_TRAINED,
    SECURE_UNMASK,
    SITE,
    TRAIN,
    to_states,
)
from fedloom.clients.storage.states import read_state
from fedloom.conf import UserError, load
from fedloom.conf.errors import FailedError
from fedloom.fusion.exact import ExactSum
from fedloom.fusion.state import digest
from fedloom.server.ledger.audit import check
from fedloom.server.rounds.privacy import check_hidden
from fedloom.server.run.checks import check as check_start
from fedloom.server.strategies import slots_of, strategy_of
from fedloom.server.unlearning.certificate import CERTIFICATES, read
from fedloom.server.unlearning.fulfilment import Unlearning
from fedloom.server.unlearning.requests import receive
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.operations.compose import CompositionOrder, compose
from tests.server.masked import (
    FOUR,
    MASKS,
    ONE,
    SITES,
    STAGES,
    TWO,
    Spoiled,
    configured,
    forget,
    gone,
    held,
    killed,
    others,
    run,
)
from tests.server.parts import Recorder, folder
from tests.server.runs import method_of


@pytest.mark.parametrize(
    "words",
    [(), ("objective.mode=independent",), ("objective.mode=regularised",), ("objective.mode=fedavg",),
     ("federation.fraction=0.6", "rounds=3"), ("objective.initialisation=own",)],
)  # fmt: skip
def test_the_sums_are_those_that_can_be_read(tmp_path: Path, words: tuple[str, ...]) -> None:
    plain, masked = configured(tmp_path, *words, name="plain"), configured(tmp_path, *words, MASKS[1], name="masked")
    run(plain)
    run(masked)
    with method_of(plain) as first, method_of(masked) as second:
        assert first.state.digest() == second.state.digest()
        for one in (first, second):
            assert all(one.state.checks()[0].values())
        states = [digest(one.state.aggregate().state) for one in (first, second)]
        assert states[0] == states[1]
    assert check(folder(masked)) == []


def test_neither_messages_nor_the_ledger_hold_what_a_site_gave(tmp_path: Path) -> None:
    config, client = configured(tmp_path, MASKS[1]), Spoiled()
    run(config, client)
    own = {site: read_state(max(store_folder(config).glob(f"*/{site}/summed-*.safetensors"))) for site in others()}
    low = torch.cat([tensor.flatten() for tensor in own[ONE].values()]).abs().double().mean()
    assert low < 2.0**32
    for kind, _, reply in client.replies:
        if kind == TRAIN:
            vector = to_states(reply.content)[SITE][MASKED].double().abs()
            assert vector.mean() > 2.0**61 and set(reply.content.array_records) == {SITE, "round", SECURE_TRAINED}
    with method_of(config) as method:
        for site in own:
            kept = torch.cat([tensor.flatten() for tensor in method.state.slots.contribution("sum", site).values()])
            assert kept.double().abs().mean() > 2.0**61
        assert list(method.state.models()) == ["sum"] and method.state.without([ONE]) is None


@pytest.mark.parametrize("stage", STAGES)
def test_whoever_drops_out_is_not_in_the_sum(tmp_path: Path, stage: str) -> None:
    config = configured(tmp_path, MASKS[1], "rounds=1")
    recorder = run(config, Spoiled(gone, [stage]))
    counts = others() if stage == SECURE_UNMASK else others(ONE)
    with method_of(config) as method:
        event = next(event for event in method.ledger.events() if event.kind == "round" and event.body["round"] == 1)
        assert event.body["record"]["masked"]["sites"] == counts
        total, initial = ExactSum(32), method.state.view()
        for name in counts:
            state = read_state(max(store_folder(config).glob(f"*/{name}/summed-*.safetensors")))
            total.add({key: one for key, one in state.items() if key.startswith("extractor.")})
        for name in set(others()) - set(counts):
            total.add(initial.slots.summed("sum", initial.integers("sum", name)))
        assert method.state.digest()["sum"] == digest(total.totals)
    assert recorder.records[0]["replies"] == len(counts)


def test_too_few_sites_end_the_round(tmp_path: Path) -> None:
    for stage in STAGES:
        config = configured(tmp_path, MASKS[1], name=stage)
        missing = (1, 2, 3, 4) if stage == SECURE_KEYS else (1, 2)  # those that began count
        message = r"[13] of 5 sites answered '.*', secure aggregation needs [24] \(first failure: site-0001: .*gone"
        with pytest.raises(FailedError, match=rf"{message}|3 valid shares for .* arrived, but 4 are needed"):
            run(config, Spoiled(gone, [stage], sites=missing))
        with method_of(config) as method:
            assert method.unlearning().last_round() == 0


def test_forgetting_leaves_the_sum_of_what_the_others_hold(tmp_path: Path) -> None:
    config, client = configured(tmp_path, MASKS[1], "federation.fraction=0.8", "rounds=3"), Spoiled()
    run(config)
    shutil.rmtree(next(store_folder(config).glob(f"*/{TWO}")))  # it is gone for good
    with method_of(config) as method:
        forget(method, config, [TWO], "first", client)
        assert 2 not in {site for _, site, _ in client.replies}
        assert method.state.digest()["sum"] == held(config, others(TWO))
        before = method.unlearning().last_round()
        listener = forget(method, config, [ONE, FOUR], "second")
        assert listener.announced[-1] == listener.records[-1]["round"] == before + 1  # not as round 3 of 2
        assert (
            "the server never read a single one" in read(folder(config) / CERTIFICATES / "second.json")["not_exact"]["masks"]
        )
        assert method.state.digest()["sum"] == held(config, others(ONE, TWO, FOUR))
        assert all(method.state.checks()[0].values())
        assert [one.state for one in map(method.ledger.request, ("first", "second")) if one] == ["verified"] * 2
        method.state.readmit([ONE])
        further = method.unlearning().last_round() + 1
        grid = InlineGrid(SITES, store_folder(config), Spoiled())
        method.train(method.joined(grid), Recorder(), rounds=further)
        assert method.state.digest()["sum"] == held(config, others(TWO, FOUR))
        forget(method, config, [ONE], "third")
        assert method.state.digest()["sum"] == held(config, others(ONE, TWO, FOUR))
    assert check(folder(config)) == []


def test_a_crash_between_masks_and_forgetting_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(tmp_path, MASKS[1])
    run(config)
    with method_of(config) as method, monkeypatch.context() as patch:
        patch.setattr(Unlearning, "lifted", killed)
        with pytest.raises(InterruptedError):
            forget(method, config, [TWO], "first")
    with method_of(config) as method:
        assert TWO in {site.name for site in method.state.members()}
        assert method.state.digest()["sum"] == held(config, others(TWO))
        forget(method, config, [TWO], "first")
        assert method.state.digest()["sum"] == held(config, others(TWO))
        assert TWO not in {site.name for site in method.state.members()}


def test_who_holds_masks_must_be_there_or_leave_too(tmp_path: Path) -> None:
    config = configured(tmp_path, MASKS[1])
    run(config)
    with method_of(config) as method:
        before = method.state.digest()
        with pytest.raises(FailedError, match=f"{ONE} did not answer, and only it can remove its masks with {TWO}"):
            forget(method, config, [TWO], "first", Spoiled(gone, [TRAIN]))
        assert method.state.digest() == before
        method.ledger.set_request("first", "refused", {})
        forget(method, config, [ONE, TWO], "both", Spoiled(gone, [TRAIN]))
        assert method.state.digest()["sum"] == held(config, others(ONE, TWO))


def test_a_site_that_lost_its_store_is_dropped_until_it_is_readmitted(tmp_path: Path) -> None:
    config = configured(tmp_path, MASKS[1], "rounds=1")
    run(config)
    shutil.rmtree(next(store_folder(config).glob(f"*/{TWO}")))
    with method_of(config) as method:
        grid, listener = InlineGrid(SITES, store_folder(config), Spoiled()), Recorder()
        method.train(method.joined(grid), listener, rounds=2)
        assert "its own state is lost" in listener.records[0]["dropped"][TWO]
        assert "forget the site, then readmit it" in listener.records[0]["dropped"][TWO]
        forget(method, config, [TWO], "first")
        method.state.readmit([TWO])
        method.train(method.joined(grid), listener, rounds=4)
        assert method.state.digest()["sum"] == held(config, others())


@pytest.mark.parametrize(
    ("experiment", "words", "message"),
    [
        ("digits", ("objective.subset_probability=0.5",), "objective.subset_probability: a mean without one site"),
        ("different_digits", (), "counts by samples; choose one that gathers only unweighted sums"),
        ("components", (), "is not summed"),
        ("digits", ("federation.partial_sums=true", MASKS[0]), "federation.partial_sums: workers would read"),
    ],
)  # fmt: skip
def test_what_needs_to_read_contributions_is_refused(experiment: str, words: tuple[str, ...], message: str) -> None:
    config = load(experiment, [MASKS[1], *words])
    with pytest.raises(UserError, match=message):
        check_hidden(config)
        strategy_of(resolve(config)).check(resolve(config))
        slots_of(resolve(config))


def test_the_sum_of_one_site_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path, MASKS[1], "rounds=1")
    run(config)
    with method_of(config) as method:
        forget(method, config, [ONE, TWO, FOUR], "most")
        forget(method, config, ["site-0000"], "one")
        request = method.ledger.request("one")
        assert request is not None and request.state == "refused"
        assert "two sites must remain" in (request.result or {})["reason"]


def test_requests_that_together_would_leave_one_site_are_taken_one_after_the_other(tmp_path: Path) -> None:
    config = configured(tmp_path, MASKS[1], "rounds=1")
    run(config)
    with method_of(config) as method:
        receive(method.ledger, "first", ["site-0000", ONE], "", {})
        recorder = forget(method, config, [TWO, FOUR], "second")
        assert "Request 'second' waits until the run has forgotten site-0000, site-0001" in " ".join(recorder.messages)
        states = {id: request.state for id in ("first", "second") if (request := method.ledger.request(id))}
        assert states == {"first": "verified", "second": "refused"}
        assert method.state.digest()["sum"] == held(config, others("site-0000", ONE))


def test_what_some_sites_gave_cannot_be_composed(tmp_path: Path) -> None:
    config = configured(tmp_path, MASKS[1], "rounds=1")
    run(config)
    with pytest.raises(UserError, match="--sites: secure aggregation hides the contributions of single sites"):
        compose(folder(config), CompositionOrder([ONE, TWO]), tmp_path / "some.safetensors")
    compose(folder(config), CompositionOrder(others(), measure=False), tmp_path / "all.safetensors")


def test_what_sites_tell_of_their_images_is_not_asked_of_those_that_hide_it(tmp_path: Path) -> None:
    config = configured(tmp_path, MASKS[1], "rounds=1")
    run(config)
    with method_of(config) as method, pytest.raises(UserError, match="recalibration: reads statistics of each site"):
        method.state.check_recalibration([ONE])


def test_going_back_to_a_round_under_masks_is_refused(tmp_path: Path) -> None:
    config = configured(
        tmp_path, MASKS[1], "federation.history=all", "federation.fraction=0.8", "rounds=4", "training.batch=1"
    )
    run(config)
    with method_of(config) as method:
        first = {site: min(one.round for one in method.ledger.history(site) if one.round) for site in others()}
        late = [site for site, round in first.items() if round > 1]
        early = next(site for site, round in first.items() if round == 1)
        method.state.check_forgetting([early], rollback=True)
        for site in late:
            with pytest.raises(UserError, match="--rollback: with secure aggregation"):
                method.state.check_forgetting([site], rollback=True)


def test_as_many_sites_are_asked_as_masks_take(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"federation\.fraction: got 0\.25, so a round asks one of 5 .* set it to 0\.4 or more"
    ):
        check_start(configured(tmp_path, MASKS[1], "federation.fraction=0.25"))
    config = configured(tmp_path, MASKS[1], "federation.fraction=0.4", "rounds=1")
    run(config)
    with method_of(config) as method:  # of three that are left 0.4 would be one
        receive(method.ledger, "two", [ONE, TWO], "", {"repair": 1})
        listener = Recorder()
        grid = InlineGrid(SITES, store_folder(config), Spoiled())
        method.train(method.joined(grid), listener, rounds=method.unlearning().last_round())
        assert listener.asked[-1] == 2 and method.unlearning().under_way() == []


def test_the_configuration_says_what_it_takes() -> None:
    with pytest.raises(UserError, match=r"federation\.secure_threshold: got 0\.4"):
        load("digits", ["federation.secure_threshold=0.4"])
