"""What sites say when they enrol: nonsense counts as nothing, and one that lies shuts nobody else out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedloom.clients.app import app
from fedloom.clients.protocol.messages import CLASSES, ENROL, METRICS, ORDER, read_order
from fedloom.clients.protocol.reply_checks import ReplyError
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.fusion.state import digest
from fedloom.server.rounds.channel import RawReply
from fedloom.server.rounds.client_metadata import ClientMetadata
from fedloom.server.rounds.listener import LogListener
from fedloom.server.rounds.participants import Participants
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines.adapter import store_folder
from tests.server.parts import Recorder
from tests.server.runs import method_of
from tests.server.test_site_classes import OwnGrid, federated, folders


def answered(place: int, images: Any, names: Any = ()) -> RawReply:
    site = Site(place, f"site-{place:04d}", federated(Path()).sites[0], 0, 1)
    content = RecordDict({METRICS: MetricRecord({} if images is None else {"samples": images})})
    content[CLASSES] = ConfigRecord({"names": list(names) if isinstance(names, tuple) else names})
    return RawReply(site, content)


@pytest.mark.parametrize("images", [None, float("nan"), 20.0, 0, -5, 2**31])
def test_a_site_that_says_no_number_of_images_has_not_enrolled(images: Any):
    roll = ClientMetadata()
    roll.take(answered(0, images))
    assert not roll.has("site-0000")
    with pytest.raises(ReplyError, match="it did not enrol: its number of images is missing, or not from 1 to 2147483647"):
        roll.images("site-0000")
    roll.take(answered(0, 20))
    assert roll.images("site-0000") == 20


def test_neither_has_one_whose_names_are_not_names():
    roll = ClientMetadata()
    roll.take(answered(0, 20, [1, 2]))
    with pytest.raises(ReplyError, match="must be a list of at most 100000 names"):
        roll.images("site-0000")


@pytest.mark.parametrize(("liars", "out"), [((0,), [0]), ((2,), [2]), ((0, 1), [2])])
def test_sites_are_compared_with_most_of_them(liars: tuple[int, ...], out: list[int]):
    roll = ClientMetadata()
    for place in (2, 1, 0):
        roll.take(answered(place, 20, ("elk", "cat") if place in liars else ("cat", "elk")))
    assert list(roll.unlike()) == [f"site-{place:04d}" for place in out]


def test_of_equally_many_the_first_counts_and_sites_that_name_nothing_do_not():
    roll = ClientMetadata()
    for place, names in enumerate([(), ("cat", "elk"), ("elk", "cat"), ("cat",)]):
        roll.take(answered(place, 20, names))
    assert roll.unlike() == {"site-0002": "its class 0 is 'elk', but class 0 of site-0001 is 'cat'"}


def test_class_numbers_with_gaps_are_compared_with_sites_whose_classes_are_numbers():
    roll = ClientMetadata()
    for place, names in enumerate([(), (), ("1", "2")]):
        roll.take(answered(place, 20, names))
    assert roll.unlike() == {"site-0002": "its class 0 is '1', but class 0 of site-0000 is '0'; write task=class behind "
                                          "its path if these are class numbers"}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "counted"),
    [
        ([7], [7]),
        ([100, 2**31 - 1], [100, 1000]),
        ([1, 50, 600, 20], [1, 50, 200, 20]),
        ([90, 100, 110], [90, 100, 110]),
    ],
)
def test_a_site_counts_no_more_than_ten_times_the_others(sizes: list[int], counted: list[int]):
    roll = ClientMetadata()
    for place, size in enumerate(sizes):
        roll.take(answered(place, size))
    assert [roll.counted(f"site-{place:04d}") for place in range(len(sizes))] == counted


class Boasting(ClientApp):
    """The real ClientApp; the second site says that it has as many images as it can."""

    def __call__(self, message: Message, context: Context) -> Message:
        reply = app(message, context)
        if ORDER in message.content.config_records and not reply.has_error():
            order, numbers = read_order(message.content), reply.content.metric_records.get(METRICS)
            if order.site == 1 and numbers and "samples" in numbers:
                reply.content[METRICS] = MetricRecord({**numbers, "samples": 2**31 - 1})
        return reply


def boasted(root: Path, *words: str) -> tuple[Config, list[str]]:
    """A run of FedAvg in which a site says that it has 2**31 - 1 images; what the user reads."""
    listener = Recorder()
    config = federated(root, "strategy={name: fedavg}", "objective={name: fedavg}", "rounds=2", "run.name=boasted", *words)
    grid = OwnGrid(3, store_folder(config), Boasting())
    grid.domains = tuple(folders(root / site.name, "cat", "dog", "owl") for site in config.roster)
    run_experiment(grid, config, listener)
    return config, listener.messages


def test_a_site_that_boasts_does_not_become_the_mean_and_can_be_forgotten(tmp_path: Path):
    config, messages = boasted(tmp_path)
    assert any("site-0001 reports 2147483647 images, many more than the other sites; " in text for text in messages)
    with method_of(config) as method:
        weights = [method.state.slots.weight("networks", site.name) for site in config.roster]
        assert weights[1] == 10 * weights[0] == 10 * weights[2]
        assert all(method.state.checks()[0].values())
        method.state.membership.forget(["site-0001"], {})
        assert all(method.state.checks()[0].values()) and method.state.slots.total("networks").addends > 0


def test_the_operator_may_let_a_site_count_as_it_says_and_it_can_still_be_forgotten(tmp_path: Path):
    config, _ = boasted(tmp_path, "federation.most_samples=2147483647")
    with method_of(config) as method:
        assert method.state.slots.weight("networks", "site-0001") == 2**31 - 1
        assert all(method.state.checks()[0].values())
        rest = method.state.slots.sum_of("networks", ["site-0000", "site-0002"])
        method.state.membership.forget(["site-0001"], {})
        assert digest(method.state.slots.total("networks").totals) == digest(rest.totals)


class Confused(ClientApp):
    """The real ClientApp; the second site does not know its number of images when it is asked first."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def __call__(self, message: Message, context: Context) -> Message:
        reply = app(message, context)
        if ORDER in message.content.config_records and (order := read_order(message.content)).kind == ENROL:
            self.asked.append(order.site)
            if order.site == 1 and self.asked.count(1) == 1:
                reply.content[METRICS] = MetricRecord({"samples": float("nan")})
        return reply


def test_its_replies_are_dropped_until_it_has(tmp_path: Path):
    config = federated(tmp_path, "rounds=2", "federation.min_replies=1")
    client = Confused()
    grid = OwnGrid(3, store_folder(config), client)
    grid.domains = tuple(folders(tmp_path / site.name, "cat", "dog", "owl") for site in config.roster)
    run_experiment(grid, config, LogListener())
    assert sorted(client.asked) == [0, 1, 1, 2]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["class_names"] == {"0": "cat", "1": "dog", "2": "owl"}
    message = "it did not enrol: its number of images is missing, or not from 1 to 2147483647"
    assert [json.loads(line)["dropped"] for line in lines] == [{"site-0001": message}, {}]


def test_a_site_that_cannot_read_its_table_is_dropped_and_the_others_train(tmp_path: Path):
    form = ["data.form={kind: features, task: class, shape: [2]}", "data.classes=2"]  # data.standardise=sites asks first
    config = federated(tmp_path, *form, "network={name: mlp, widths: [4]}", "federation.min_replies=1")
    grid = OwnGrid(3, store_folder(config))
    for place, head in enumerate(("age,dose,sick", "1,2,0", "age,dose,sick")):
        (tmp_path / f"{place}.csv").write_text(f"{head}\n" + "".join(f"{row},{row % 7},{row % 2}\n" for row in range(40)))
    grid.domains = tuple(f"table:{tmp_path}/{place}.csv?target=sick" for place in range(3))
    assert run_experiment(grid, config, LogListener())["status"] == "finished"
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    dropped = json.loads(line)["dropped"]
    assert list(dropped) == ["site-0001"] and dropped["site-0001"].startswith("it did not enrol: UserError")


def test_a_site_has_no_more_names_than_outputs_and_few_columns():
    roll = ClientMetadata()
    many = answered(0, 20, tuple(f"c{number}" for number in range(50_000)))
    many.content[CLASSES]["things"] = [f"c{number}" for number in range(50_000)]  # type: ignore[index]
    roll.take(many, 10)
    assert len(roll.class_names()["site-0000"]) == len(roll.class_meanings()["site-0000"]) == 10
    table = answered(1, 20)
    table.content[CLASSES]["columns"] = [f"c{number}" for number in range(50_000)]  # type: ignore[index]
    roll.take(table, 10, 4)
    with pytest.raises(ReplyError, match=r"its table has 50000 columns, but data.form.shape is \[4\]"):
        roll.images("site-0001")


def test_the_server_keeps_as_many_names_as_the_site_has_outputs(tmp_path: Path):
    config, many = federated(tmp_path, "data.classes=7", "data.heads=shared"), answered(0, 20, ("x",) * 500)
    (site, *_) = config.roster
    members = Participants(config, False, lambda sites: iter([replace(many, site=site)]), print)
    members.enrol([site])
    assert [len(names) for names in members.enrolled_names([site])] == [7]


@pytest.mark.parametrize("more", ["ward=a", "dose"])
def test_a_column_that_only_one_site_has_is_to_be_left_out_there(more: str):
    roll = ClientMetadata()
    for place, columns in enumerate((["age"], ["age", more], ["age"])):
        reply = answered(place, 20)
        reply.content[CLASSES]["columns"] = columns  # type: ignore[index]
        roll.take(reply, 2, 1)
    hint = f"write ?without={more[:4]} in the domain of each site with such a column, and the number of columns in"
    assert roll.unlike_columns(1) == {"site-0001": f"its table has {more}, unlike site-0000; {hint} data.form.shape"}
