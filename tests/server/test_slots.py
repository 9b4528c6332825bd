"""What a method of one's own may do with its slots: every sum is that of the contributions, or the method is refused."""

import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from fedloom.conf import UserError, load
from fedloom.fusion.exact import ExactSum, quantise
from fedloom.fusion.state import State, digest
from fedloom.server.ledger.audit import check
from fedloom.server.ledger.declared import Sum, declared_sums
from fedloom.server.ledger.ledger import Ledger
from fedloom.server.ledger.slots import Slots, SlotUpdate
from fedloom.server.rounds.transport import TooFewRepliesError
from fedloom.server.strategies.base import OwnStrategyError
from fedloom.sims.operations.simulate import simulate
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from tests.server import slot_methods
from tests.server.strategies import hypothesis_on_disk

pytestmark = pytest.mark.usefixtures("blank_pictures")

HERE = "tests.server.slot_methods"
SITES = "sites=[{domain: digits, samples: 60}, {domain: digits, samples: 50}, {domain: digits, samples: 40}]"
WORDS = ["rounds=2", "data.size=8", "network={name: mlp, widths: [8]}", "data.test_limit=50", "baselines=[]", SITES]


def trained(root: Path, strategy: str, *words: str, engine: str = "inline") -> dict[str, Any]:
    """The summary of a run of a method of slot_methods."""
    both = [f"strategy={{name: '{HERE}:{strategy}'}}", f"objective={{name: '{HERE}:Asked'}}"]
    config = load("digits", [*WORDS, *both, f"engine.name={engine}", f"run.root={root}", f"run.name={strategy}", *words])
    simulate(config)
    return json.loads((root / strategy / "summary.json").read_text())


def problems(path: Path) -> list[Any]:
    """What is wrong in the ledger; files of sites that were put into twice in a round wait there to be pruned."""
    return [problem for problem in check(path) if problem.severity == "problem"]


@pytest.mark.parametrize("strategy", ["Twice", "Second", "Nested"])
def test_every_sum_is_that_of_the_contributions(tmp_path: Path, strategy: str):
    found = trained(tmp_path, strategy)
    assert found["status"] == "finished" and found["checks"] and all(found["checks"].values())
    assert problems(tmp_path / strategy) == []
    same = trained(tmp_path, "FedProx")["digest"]["networks"]
    assert found["digest"]["networks"] == same


@pytest.mark.parametrize(("strategy", "message"), [
    ("Misspelt", r"no slot 'netwrks' \(the strategy's slots\(\) has: networks\)"),
    ("Unsaved", r"no server state 'strt' \(saved: start\)")])  # fmt: skip
def test_a_misspelt_slot_or_state_is_named_with_those_that_exist(tmp_path: Path, strategy: str, message: str):
    with pytest.raises(OwnStrategyError, match=message):
        trained(tmp_path, strategy)


def test_what_all_sites_put_at_first_is_kept_in_every_slot(tmp_path: Path):
    found = trained(tmp_path, "Begun", "federation.fraction=0.34")
    assert len(found["checks"]) == 8 and all(found["checks"].values()) and problems(tmp_path / "Begun") == []


def test_of_a_question_left_early_what_was_put_counts(tmp_path: Path):
    found = trained(tmp_path, "Enough")
    assert all(found["checks"].values()) and problems(tmp_path / "Enough") == []
    with pytest.raises(TooFewRepliesError, match=r"2 good replies, federation.min_replies=3"):
        trained(tmp_path, "Enough", "federation.min_replies=3", "run.overwrite=true")


def test_weighted_slots_of_a_site_count_by_one_number_of_samples(tmp_path: Path):
    with pytest.raises(
        TooFewRepliesError, match="must have one number of samples in all weighted slots; put into all at once"
    ):
        trained(tmp_path, "Unequal")


@pytest.mark.parametrize(("strategy", "message"), [
    ("Fraction", r"slot 'networks': samples of site-0000 must be a whole number from 0, not 2\.5"),
    ("Unknown", r"unknown slot 'network'.*did you mean 'networks'"),
    ("Slashed", r"the slot 'networks/x' must have a name of letters"),
    ("NoSlots", r"its slots\(\) must return a dictionary of fedloom\.server\.strategies\.Sum and PerClientSlot"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, strategy: str, message: str):
    with pytest.raises(UserError, match=message):
        trained(tmp_path, strategy)


def test_a_refused_site_leaves_nothing_in_what_workers_add_up(tmp_path: Path):
    both = ["strategy={name: sum_aggregation}", f"objective={{name: '{HERE}:Spoiled', mode: exact}}"]
    digests = {}
    for engine, more in (("inline", []), ("ray", ["federation.partial_sums=true", "engine.workers=1"])):
        name = f"{engine}-run"
        simulate(load("digits", [*WORDS, *both, f"engine.name={engine}", f"run.root={tmp_path}", f"run.name={name}", *more]))
        found = json.loads((tmp_path / name / "summary.json").read_text())
        assert found["status"] == "finished" and all(found["checks"].values())
        digests[engine] = found["digest"], (tmp_path / name / "states/aggregate.safetensors").read_bytes()
        assert "largest_weight" in (tmp_path / name / "metrics.jsonl").read_text()
    assert digests["inline"] == digests["ray"]


def test_workers_measure_a_change_from_the_network_that_was_sent(tmp_path: Path):
    """A site's last contribution is further away here, since other sites have trained in between."""
    words = ["rounds=5", "federation.fraction=0.34", "federation.largest_change=1.0", "training.rate=0.1"]
    words += ["training.epochs=3", "training.schedule=constant"]
    alone = trained(tmp_path, "FedProx", *words)
    partial = trained(
        tmp_path, "FedProx", *words, "federation.partial_sums=true", "engine.workers=1", "run.overwrite=true", engine="ray"
    )
    assert partial["status"] == "finished" and partial["digest"] == alone["digest"]


def test_workers_add_up_weighted_sums(tmp_path: Path):
    partial = trained(tmp_path, "FedProx", "federation.partial_sums=true", "engine.workers=1", engine="ray")
    assert partial["digest"] == trained(tmp_path, "FedProx", "run.overwrite=true")["digest"]
    with pytest.raises(UserError, match=r"federation\.partial_sums: workers can add up only one sum"):
        trained(tmp_path, "Second", "federation.partial_sums=true", engine="ray")


def test_a_ledger_is_not_read_with_other_slots_than_it_was_made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trained(tmp_path, "FedProx")
    monkeypatch.setattr(slot_methods.FedProx, "slots", lambda self, config: {"networks": slot_methods.Sum()})
    with pytest.raises(UserError, match="declares other slots than when this run was made"):
        unlearn(tmp_path / "FedProx", UnlearningRequest(["site-0001"], "one"))
    monkeypatch.undo()
    assert problems(tmp_path / "FedProx") == []
    unlearn(tmp_path / "FedProx", UnlearningRequest(["site-0001"], "one"))


def test_with_the_whole_history_a_run_goes_back_to_before_its_first_round(tmp_path: Path):
    trained(tmp_path, "FedProx", "federation.history=all")
    unlearn(tmp_path / "FedProx", UnlearningRequest(["site-0001"], rollback=True))


def merge(slots: Slots, site: str, state: State, samples: int, round: int) -> None:
    """Put a site's state into the slot as a worker's partial sum does."""
    new, change, times = ExactSum(32), ExactSum(32), slots.times("networks", samples)
    new.add(quantise(state, 32), times)
    there = slots.has("networks", site)
    old = slots.contribution("networks", site) if there else {}
    change.replace(old, quantise(state, 32), slots.weight("networks", site) if there else 0, times)
    blob = slots.contributions.blob_of({"networks": state})
    slots.merge("networks", change.totals, {site: samples}, round, {site: blob}, node=True, new=new.totals)


NAMES: tuple[str, ...] = ("a", "b", "c", "d")
ROUNDS = st.lists(
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 999), st.integers(1, 9)), max_size=5), max_size=5
)


@hypothesis.given(rounds=ROUNDS, weighted=st.booleans(), data=st.data())
@hypothesis.settings(hypothesis_on_disk, max_examples=50)
def test_a_sum_over_any_sites_is_that_of_their_contributions(
    rounds: list[list[tuple[str, int, int]]], weighted: bool, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
):
    """Whether it was added up in the round, as rounds are committed or abandoned, and sites put once or several times."""
    sites = load("digits", ["sites=[{domain: digits, count: 4}]"]).roster
    names = dict(zip(NAMES, (site.name for site in sites), strict=True))
    declared = {"networks": Sum(weighted=weighted)}
    folder = tmp_path_factory.mktemp("slots")
    with Ledger.create(folder, "run", "", 32, list(names.values()), declared_sums(declared), list(declared)) as ledger:
        slots = Slots(declared, sites, ledger, 32, "latest")
        last: dict[str, tuple[int, int]] = {}
        for number, puts in enumerate(rounds, start=1):
            before = dict(last)
            for name, value, samples in puts:
                state = {"w": torch.tensor([value / 7])}
                if data.draw(st.booleans(), "by a worker"):
                    merge(slots, names[name], state, samples, number)
                else:
                    slots.put([SlotUpdate("networks", names[name], state, samples)], number)
                last[name] = value, samples
            if data.draw(st.booleans(), "commit"):
                slots.commit(number, {"round": number})
            else:
                slots.abandon()
                last = before
            for some in ([name for name, *_ in puts], data.draw(st.lists(st.sampled_from(NAMES), unique=True), "sites")):
                wanted = ExactSum(32)
                for name in dict.fromkeys(some):
                    if name in last:
                        value, samples = last[name]
                        part = ExactSum(32)
                        part.add({"w": (torch.tensor([value / 7]).double() * 2.0**32).round().to(torch.int64)})
                        wanted.add(part.totals, samples if weighted else 1)
                got = slots.sum_of("networks", [names[name] for name in dict.fromkeys(some)])
                assert digest(got.totals) == digest(wanted.totals) and got.addends == wanted.addends
