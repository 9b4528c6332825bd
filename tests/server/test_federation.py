"""The sites as the server sees them: which node is which site, who is missing, who does not answer."""

from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedloom.clients.protocol.messages import CONFIG, ORDER, TRAIN, TaskInstructions, config_digest, text_record, to_arrays
from fedloom.conf import Config, UserError, to_json
from fedloom.server.rounds.channel import ClientChannel
from fedloom.sims.engines.adapter import FIRST_NODE, store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.server.parts import Recorder, SilentGrid, WatchedApp, sent_in, set_up, small, started

PATIENCE = 6.0  # seconds: two sites have trained by then, also on a busy machine


class NamedGrid(InlineGrid):
    """The inline engine, but its nodes have a node-config of their own: `configs`, by place."""

    configs: tuple[dict[str, str | int], ...] = ()

    def context(self, message: Message) -> Context:
        context = super().context(message)
        mine = self.configs[message.metadata.dst_node_id - FIRST_NODE]
        context.node_config = {"store": self.store, **mine}
        return context


def named(*configs: dict[str, str | int]) -> type[NamedGrid]:
    return type("Named", (NamedGrid,), {"configs": configs})


def federation(config: Config, grid: type[InlineGrid] = InlineGrid, nodes: int | None = None) -> ClientChannel:
    sites = config.roster
    return ClientChannel(grid(len(sites) if nodes is None else nodes, store_folder(config)), sites, window=32)


NAMES = "sites=[{domain: digits, name: north, samples: 20}, {domain: digits, name: south, samples: 20}]"


def test_nodes_are_known_by_their_place_in_the_roster(tmp_path: Path):
    found = federation(small(tmp_path, sites=3))
    found.join(0.0)
    assert found.nodes == {f"site-000{place}": FIRST_NODE + place for place in range(3)}


def test_nodes_are_known_by_the_name_in_their_node_config(tmp_path: Path):
    found = federation(small(tmp_path, NAMES), named({"site": "south"}, {"site": "north"}))
    found.join(0.0)
    assert found.nodes == {"south": FIRST_NODE, "north": FIRST_NODE + 1}


def test_a_name_in_the_node_config_counts_more_than_a_place(tmp_path: Path):
    mixed = named({"site": "south", "partition-id": 0}, {"partition-id": 0})
    found = federation(small(tmp_path, NAMES), mixed)
    found.join(0.0)
    assert found.nodes == {"south": FIRST_NODE, "north": FIRST_NODE + 1}


def test_named_nodes_train_the_same_as_numbered_ones(tmp_path: Path):
    one = set_up(small(tmp_path / "one", NAMES)).all_rounds()
    swapped = named({"site": "south"}, {"site": "north"})
    other = set_up(small(tmp_path / "other", NAMES), grid=swapped).all_rounds()
    assert one.aggregate.digest() == other.aggregate.digest()


@pytest.mark.parametrize(
    ("grid", "nodes", "missing"),
    [
        (InlineGrid, 2, r"1 of 3 sites did not join within 0\.1 s: site-0002 \(start their nodes"),
        (InlineGrid, 0, r"3 of 3 sites did not join within 0\.1 s: site-0000, site-0001, site-0002 \("),
        (named({"partition-id": 0}, {"site": "elsewhere"}, {"partition-id": 2}), 3, r"1 of 3 .*: site-0001 \("),
        (named({"partition-id": 0}, {}, {"partition-id": 7}), 3, r"2 of 3 .*: site-0001, site-0002 \("),
    ],
    ids=["too few nodes", "no nodes", "a stranger", "nobody in particular"],
)
def test_sites_that_never_join_are_named(tmp_path: Path, grid, nodes, missing):
    found = federation(small(tmp_path, sites=3), grid, nodes)
    with pytest.raises(UserError, match=missing):
        found.join(0.1)


def test_of_many_missing_sites_five_are_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"7 of 7 .*: site-0000, .*, site-0004, \.\.\. \("):
        federation(small(tmp_path, sites=7), nodes=0).join(0.0)


def test_a_node_that_could_not_say_who_it_is_is_asked_again(tmp_path: Path):
    class Late(NamedGrid):
        asked = 0

        def context(self, message: Message) -> Context:
            Late.asked += 1
            self.configs = ({"partition-id": 0}, {} if Late.asked <= 2 else {"partition-id": 1})
            return super().context(message)

    found = federation(small(tmp_path), Late)
    found.join(5.0)
    assert set(found.nodes) == {"site-0000", "site-0001"}
    assert Late.asked == 3  # the node that had answered was not asked again


def test_a_restarted_node_takes_its_sites_place_under_its_new_id(tmp_path: Path):
    class Restarting(NamedGrid):
        configs = ({"site": "north"}, {"site": "south"}, {"site": "north"})
        alive: tuple[int, ...] = (0, 1)

        def get_node_ids(self):
            return [FIRST_NODE + place for place in self.alive]

    found = federation(small(tmp_path, NAMES), Restarting)
    found.join(0.0)
    assert found.nodes == {"north": FIRST_NODE, "south": FIRST_NODE + 1}
    assert isinstance(found.grid, Restarting)
    found.grid.alive = (1, 2)
    found.refresh()
    assert found.nodes == {"north": FIRST_NODE + 2, "south": FIRST_NODE + 1}


def orders(config: Config) -> list[tuple]:
    """The first round's orders to all sites."""
    sites, text = config.roster, to_json(config)
    sent = {name: to_arrays(state) for name, state in sent_in(started(config), 1).items()}
    same = {"config": config_digest(text), "run": "run", "round": 1, "rounds": 2, "base": 0, "members": len(sites)}
    return [
        (site, RecordDict({ORDER: TaskInstructions(site=site.index, **same).record(), CONFIG: text_record(text), **sent}))
        for site in sites
    ]


def test_a_site_that_does_not_answer_in_time_fails_alone(tmp_path: Path):
    config = small(tmp_path, sites=3, samples=20)
    found = federation(config, SilentGrid)
    found.join(1.0)
    replies = {reply.site.name: reply for reply in found.ask(TRAIN, orders(config), 1, timeout=PATIENCE)}
    assert set(replies) == {"site-0000", "site-0001", "site-0002"}
    assert replies["site-0001"].content is None
    assert replies["site-0001"].reason == f"no reply within {PATIENCE:g} s"
    for name in ("site-0000", "site-0002"):
        content = replies[name].content
        assert content is not None
        assert content.metric_records["metrics"]["samples"] == 20


def test_sites_still_waiting_behind_a_silent_one_fail_too_when_the_time_is_up(tmp_path: Path):
    config = small(tmp_path, sites=3, samples=20)
    found = federation(config, SilentGrid)
    found.join(1.0)
    found.window = 1
    replies = [(reply.site.name, reply.reason) for reply in found.ask(TRAIN, orders(config), 1, timeout=PATIENCE)]
    late = f"no reply within {PATIENCE:g} s"
    assert replies == [("site-0000", ""), ("site-0001", late), ("site-0002", late)]


def test_a_silent_site_is_dropped_from_a_round_and_the_round_counts(tmp_path: Path):
    config = small(tmp_path, f"federation.timeout={PATIENCE}", "rounds=1", sites=3, samples=20)
    run = set_up(config, grid=SilentGrid).all_rounds()
    assert run.listener.records[0]["replies"] == 2
    assert run.listener.records[0]["dropped"] == {"site-0001": f"no reply within {PATIENCE:g} s"}


def test_a_site_without_a_node_fails_alone(tmp_path: Path):
    config = small(tmp_path, sites=2, samples=20)
    found = federation(config, nodes=1)
    found.refresh()
    replies = {reply.site.name: reply.reason for reply in found.ask(TRAIN, orders(config), 1, timeout=5.0)}
    assert replies == {"site-0000": "", "site-0001": "not connected"}


def test_an_error_is_reported_in_one_line_that_begins_with_its_kind(tmp_path: Path):
    def fail(reply: Message) -> Message:
        raise ValueError("a headline\n\n  the cause  \n")

    run = set_up(small(tmp_path, "rounds=1", samples=20), WatchedApp(fail, place=1, rounds=(1,)))
    listener: Recorder = run.all_rounds().listener
    assert ("site-0001", False, "ValueError: a headline the cause") in listener.replies


def test_a_query_reaches_no_training(tmp_path: Path):
    client = WatchedApp()
    set_up(small(tmp_path), client)
    assert client.orders == []
    assert TRAIN == "train"


def test_a_node_that_answers_without_saying_who_it_is_is_reported(tmp_path: Path):
    config = small(tmp_path, sites=1)
    mute = ClientApp()
    mute.query()(lambda message, context: Message(RecordDict(), reply_to=message))
    found = ClientChannel(InlineGrid(1, store_folder(config), mute), config.roster, window=1)
    with pytest.raises(UserError, match="did not say which site it is"):
        found.join(0.0)


def test_the_time_of_a_round_ends_even_while_replies_trickle_in(tmp_path: Path):
    config = small(tmp_path, sites=3)
    found = federation(config)
    found.window = 1
    found.join(0.0)
    replies = list(found.ask(TRAIN, orders(config), 1, timeout=0.0))
    assert [reply.content is not None for reply in replies] == [True, False, False]
    assert {reply.reason for reply in replies[1:]} == {"no reply within 0 s"}
