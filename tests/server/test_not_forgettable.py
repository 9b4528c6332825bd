"""`strategy.forgettable=false`: the averaging methods store no contributions, and give the same bits."""

from pathlib import Path

import pytest

from fedloom.clients.storage.states import read_state
from fedloom.conf.errors import UserError
from fedloom.fusion.state import digest
from fedloom.server.ledger import Ledger
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run.training_run import one_round
from fedloom.server.unlearning.requests import refuse
from fedloom.sims.engines import open_engine
from tests.server.averages import configured, network_of, played, same
from tests.server.parts import set_up

OFF = "strategy.forgettable=false"
MASKS = ["strategy.weighting=equal", "federation.secure_aggregation=true"]


def finished(root: Path, name: str, *words: str) -> str:
    """Run FedAvg without contributions in the folder `name`; return the digest of the aggregate."""
    config = configured(root, "strategy.name=fedavg", OFF, f"run.name={name}", *words)
    with open_engine(config) as grid:
        summary = run_experiment(grid, config, LogListener())
    assert summary["status"] == "finished" and "none can be subtracted" in str(summary["traces"])
    return digest(read_state(root / name / "states" / "aggregate.safetensors"))


@pytest.mark.parametrize("more", [[], ["strategy.weighting=equal"], MASKS], ids=["samples", "equal", "masks"])
@pytest.mark.parametrize("name", ["fedavg", "fedadam", "ditto"])
def test_the_bits_are_those_of_a_run_that_stores_contributions(tmp_path: Path, name: str, more: list[str]):
    sites = "count: 3, samples: 60, partition: {name: dirichlet, alpha: 1}"
    words = [f"strategy.name={name}", *more]
    stored = played(tmp_path / "stored", *words, sites=sites)
    assert same(played(tmp_path / "not", *words, OFF, sites=sites), stored)


def test_sites_that_do_not_answer_in_a_round_do_not_count(tmp_path: Path):
    words = ["strategy.name=fedavgm", "rounds=4", "federation.fraction=0.4"]
    assert same(played(tmp_path / "not", *words, OFF), played(tmp_path / "stored", *words))


@pytest.mark.slow
def test_workers_that_add_up_give_the_same_bits_and_write_no_contributions(tmp_path: Path):
    inline = finished(tmp_path, "inline")
    assert finished(tmp_path, "ray", "engine.name=ray", "engine.workers=2", "federation.partial_sums=true") == inline
    with Ledger.open(tmp_path / "ray", server=False) as ledger:
        assert not ledger.all_latest()


def test_a_run_continues_from_its_ledger_to_the_same_bits(tmp_path: Path):
    whole, cut = (set_up(configured(tmp_path / part, "strategy.name=fedadam", OFF)) for part in ("whole", "cut"))
    whole.all_rounds()
    one_round(cut.loop, 1)
    cut.aggregate.slots.reload()
    one_round(cut.loop, 2)
    assert same(cut, whole) and network_of(cut)


def test_no_site_can_be_forgotten(tmp_path: Path):
    finished(tmp_path, "off")
    with (
        Ledger.open(tmp_path / "off", server=False) as ledger,
        pytest.raises(UserError, match=r"the method stores no contributions, .*train again without it"),
    ):
        refuse(ledger, ["site-0001"])


@pytest.mark.parametrize("name", ["scaffold", "fednova", "fedbuff"])
def test_methods_that_read_contributions_refuse_it(tmp_path: Path, name: str):
    with pytest.raises(UserError, match=rf"strategy\.forgettable: strategy {name} needs the sites' contributions"):
        configured(tmp_path, f"strategy.name={name}", OFF)


def test_a_history_of_contributions_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"federation\.history: 'all' stores contributions"):
        configured(tmp_path, "strategy.name=fedavg", OFF, "federation.history=all")
