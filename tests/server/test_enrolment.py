"""Who gets a name: its holder keeps it, the node that it is bound to comes first, and nobody waits for a node that hangs."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.clients.protocol.messages import QUERY
from fedloom.conf import Config, UserError
from fedloom.server.ledger import Ledger
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.rounds.nodes import InMemoryBindings
from fedloom.server.run.training_run import one_round
from fedloom.sims.engines.adapter import FIRST_NODE, store_folder
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.federation.plan import Plan, write_plan
from fedloom.sims.operations.ledger import events, events_table
from fedloom.sims.operations.readmit import readmit
from tests.server.parts import set_up, small

A, B, C = (FIRST_NODE + place for place in range(3))
NAMES = "sites=[{domain: digits, name: north, samples: 20}, {domain: digits, name: south, samples: 20}]"


class Nodes(InlineGrid):
    """Nodes that say that they are the sites in `names`; `alive` are there, `mute` never answer a query."""

    simulated = False

    def __init__(self, config: Config, names: Mapping[int, str], client: ClientApp | None = None) -> None:
        super().__init__(len(names), store_folder(config), *([client] if client else []))
        self.names, self.alive, self.mute = dict(names), list(names), set[int]()
        self.queries: list[int] = []

    def get_node_ids(self) -> list[int]:
        return list(self.alive)

    def submit(self, message: Message) -> None:
        if message.metadata.message_type == QUERY:
            self.queries.append(message.metadata.dst_node_id)
            if message.metadata.dst_node_id in self.mute:
                return
        super().submit(message)

    def context(self, message: Message) -> Context:
        context, name = super().context(message), self.names[message.metadata.dst_node_id]
        context.node_config = {"store": self.store, **({"site": name} if name else {})}
        return context


def federation(
    config: Config, names: Mapping[int, str], bound: Mapping[str, int] | None = None
) -> tuple[ClientChannel, Nodes]:
    grid, kept = Nodes(config, names), dict(bound or {})
    return ClientChannel(grid, config.roster, 32, InMemoryBindings(kept)), grid


def test_a_name_that_is_taken_is_refused_and_both_nodes_are_named(tmp_path: Path):
    found, grid = federation(small(tmp_path, NAMES), {A: "north", B: "south"})
    found.join(0.0)
    grid.names[C], grid.alive = "north", [A, B, C]
    for _ in range(3):
        found.refresh()
    assert found.nodes == {"north": A, "south": B}
    assert found.enrolment.warnings == [f"north: node {C} also claims this name and is refused: node {A} is north"]


def test_a_name_whose_holder_is_gone_is_taken_but_what_the_site_gave_is_not(tmp_path: Path):
    found, grid = federation(small(tmp_path, NAMES), {A: "north", B: "south", C: "north"})
    grid.alive = [A, B]
    found.join(0.0)
    assert found.enrolment.owns("north")
    grid.alive = [B, C]
    found.refresh()
    assert found.nodes == {"north": C, "south": B}
    assert not found.enrolment.owns("north") and found.enrolment.owns("south")
    (warning,) = found.enrolment.warnings
    assert f"node {C} takes the place of node {A}" in warning and f"readmit RUN north --node {C}" in warning
    # the one that it is bound to comes first when it is back
    grid.alive = [A, B, C]
    found.refresh()
    assert found.nodes["north"] == A and found.enrolment.owns("north")
    # and the operator's word is the last
    found.bindings.bind({"north": C})
    found.refresh()
    assert found.nodes["north"] == C and found.enrolment.owns("north")


def test_who_came_first_is_kept_by_the_ledger_and_counts_after_a_restart(tmp_path: Path):
    config = small(tmp_path, NAMES, "rounds=2")
    run = set_up(config)
    one_round(run.loop, 1)
    ledger = run.aggregate.ledger
    first = ClientChannel(Nodes(config, {A: "north", B: "south"}), config.roster, 32, ledger)
    first.join(0.0)
    assert ledger.bound() == {"north": A, "south": B}
    # a server that starts anew meets another node first
    again = ClientChannel(Nodes(config, {B: "south", C: "north"}), config.roster, 32, ledger)
    again.join(0.0)
    assert again.nodes == {"north": C, "south": B}
    assert not again.enrolment.owns("north")
    assert ledger.bound() == {"north": A, "south": B}


def test_readmit_with_a_node_is_the_operators_word_beside_a_running_server(tmp_path: Path):
    config = small(tmp_path, NAMES, "rounds=1", "engine.name=flower")
    ledger = set_up(config).all_rounds().aggregate.ledger
    ledger.bind({"north": A, "south": B})
    path = tmp_path / config.run.name
    (path / "config.yaml").write_text(_stored(config))
    assert f"north is at node {C} now, no longer at {A}" in readmit(path, ["north"], C)
    assert ledger.bound() == {"north": C, "south": B}
    with pytest.raises(UserError, match="unknown site 'east'"):
        readmit(path, ["east"], C)
    with pytest.raises(UserError, match=f"--node: node {B} belongs to 'south' in this run"):
        readmit(path, ["north"], B)
    with pytest.raises(UserError, match="--node: takes one site, got 2 sites"):
        readmit(path, ["north", "south"], C)
    for odd in (-5, 0, 2**70):
        with pytest.raises(UserError, match=f"--node: got {odd}, takes the id"):
            readmit(path, ["north"], odd)
    ledger.close()
    readmit(path, ["north"], A)  # and without one
    with Ledger.open(path, server=False) as left:
        assert left.bound() == {"north": A, "south": B}


def test_a_node_that_is_vouched_for_is_the_sites_in_the_federation(tmp_path: Path):
    folder = tmp_path / "machines"
    config = small(tmp_path, NAMES, "rounds=1", "engine.name=flower", f"engine.address={folder}")
    ledger = set_up(config).all_rounds().aggregate.ledger
    path = tmp_path / config.run.name
    (path / "config.yaml").write_text(_stored(config))
    ledger.close()
    write_plan(Plan(sites=[{"name": "north"}, {"name": "south"}]), folder)
    for name, node in {"north": C, "south": B}.items():
        (folder / "server" / "keys" / f"{name}.id").write_text(str(node))
    with pytest.raises(UserError, match=f"--node: node 42 belongs to no site in {folder}; the node of 'north' is {C}"):
        readmit(path, ["north"], 42)
    with pytest.raises(UserError, match=f"--node: node {B} belongs to 'south' in {folder}; the node of 'north' is {C}"):
        readmit(path, ["north"], B)
    readmit(path, ["north"], C)
    table = events_table(path, events(path)).markdown()
    assert f"nodes north {C}; by operator" in table


def test_nodes_that_are_not_sites_of_the_run_are_named(tmp_path: Path):
    config = small(tmp_path, NAMES)
    found, _ = federation(config, {A: "north", B: "soth", C: "south"})
    found.join(0.0)
    found.refresh()
    assert found.enrolment.warnings == ["connected, but not asked, because they are not sites of this run: soth"]
    kept = InMemoryBindings({"north": A, "south": C})
    found = ClientChannel(Nodes(config, {A: "north", B: "soth", C: "south"}), config.roster[:1], 32, kept)  # without south
    found.join(0.0)
    forgotten, others = found.enrolment.warnings
    assert forgotten.startswith("connected, but not asked, because this run has forgotten them: south (")
    assert others == "connected, but not asked, because they are not sites of this run: soth"
    found, _ = federation(config, {A: "north", B: "soth"})
    with pytest.raises(UserError, match=r"sites did not join .*: south \(.*; connected, but not a site of this run: soth\)"):
        found.join(0.0)


def _stored(config: Config) -> str:
    from fedloom.server.run_folder.folder import stored

    return stored(config)


def test_a_node_that_fails_to_say_who_it_is_is_asked_again_for_ever_ever_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Once five failures were enough to be forgotten."""
    monkeypatch.setattr("fedloom.server.rounds.enrolment.RETRY_SECONDS", 0.01)
    found, grid = federation(small(tmp_path, NAMES), {A: "north", B: ""})
    begin = time.monotonic()
    while grid.queries.count(B) < 8:
        found.refresh(0.5)
        assert time.monotonic() - begin < 60
    assert time.monotonic() - begin > 0.01 * (2**7 - 1)  # each time it waits twice as long
    grid.names[B] = "south"
    found.join(30.0)
    assert found.nodes == {"north": A, "south": B}
    assert grid.queries.count(A) == 1


def test_a_node_that_hangs_and_is_not_needed_holds_no_one_up(tmp_path: Path):
    found, grid = federation(small(tmp_path, NAMES), {A: "north", B: "south", C: "elsewhere"})
    grid.mute = {C}
    begin = time.monotonic()
    found.join(60.0)
    for _ in range(20):
        found.refresh()
    assert time.monotonic() - begin < 10
    assert grid.queries.count(C) == 1  # it is still to answer that one


def test_a_node_that_hangs_is_reported_beside_the_site_that_is_missing(tmp_path: Path):
    found, grid = federation(small(tmp_path, NAMES), {A: "north", B: "south"})
    grid.mute = {B}
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"1 of 2 sites did not join within 1 s: south"):
        found.join(1.0)
    assert time.monotonic() - begin < 20
    assert found.nodes == {"north": A}


def test_a_node_that_hangs_costs_a_round_without_its_site_no_time_but_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fedloom.server.rounds.enrolment.REFRESH_SECONDS", 1.0)
    found, grid = federation(small(tmp_path, NAMES), {A: "north", B: "south", C: "south"})
    grid.alive, grid.mute = [A, B], {C}
    found.join(0.0)
    grid.alive = [A, C]
    found.refresh()
    begin = time.monotonic()
    for _ in range(20):
        found.refresh()
    assert time.monotonic() - begin < 5


def test_a_question_that_is_lost_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedloom.server.rounds.enrolment.ANSWER_SECONDS", 0.2)
    found, grid = federation(small(tmp_path, NAMES), {A: "north", B: "south"})
    grid.mute = {B}
    with pytest.raises(UserError):
        found.join(0.3)
    grid.mute = set()
    found.join(20.0)
    assert found.nodes == {"north": A, "south": B}


def test_a_node_that_comes_back_under_its_id_is_asked_who_it_is_now(tmp_path: Path):
    found, grid = federation(small(tmp_path, NAMES), {A: "north", B: "south"})
    found.join(0.0)
    grid.alive = [A]
    found.refresh()
    grid.names[B], grid.alive = "nobody", [A, B]
    found.refresh()
    assert grid.queries.count(B) == 2
