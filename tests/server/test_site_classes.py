"""Sites with images of their own: one whose classes are others is not asked; other versions of messages are refused."""

from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from PIL import Image

from fedloom.clients.data import num_classes, site_sizes
from fedloom.clients.protocol.messages import WHO
from fedloom.conf import Config, UserError, load
from fedloom.conf.errors import FailedError
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid


def folders(root: Path, *names: str) -> str:
    """A domain of grey squares, 20 of each class."""
    for shade, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for number in range(20):
            Image.new("L", (8, 8), 60 * shade + number).save(root / name / f"{number}.png")
    return f"images:{root}"


def federated(tmp_path: Path, *overrides: str) -> Config:
    sites = "sites=[{domain: hospital-a}, {domain: hospital-b}, {domain: hospital-c}]"
    small = ["rounds=1", "data.size=8", "network.width=0.25", "baselines=[]", "data.classes=3", "evaluation.where=sites"]
    return load("digits", [sites, *small, f"run.root={tmp_path}", "run.name=run", "engine.name=flower", *overrides])


class OwnGrid(InlineGrid):
    """Nodes that are no simulation's: each reads the images that its own node-config names."""

    simulated = False
    domains: tuple[str, ...] = ()

    def context(self, message: Message) -> Context:
        context = super().context(message)
        place = int(context.node_config["partition-id"])
        context.node_config = {
            "partition-id": place,
            "store": str(context.node_config["store"]),
            "domain": self.domains[place],
        }
        return context


def test_a_site_whose_classes_are_others_is_not_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config = federated(tmp_path)
    names = ("cat", "dog", "owl"), ("cat", "elk", "owl"), ("cat", "dog", "owl")
    grid = OwnGrid(3, store_folder(config))
    grid.domains = tuple(folders(tmp_path / str(place), *each) for place, each in enumerate(names))
    with caplog.at_level("INFO"):
        summary = run_experiment(grid, config, LogListener())
    assert "site-0001 is not asked: its class 1 is 'elk', but class 1 of site-0000 is 'dog'" in caplog.text
    assert (summary["status"], [site["samples"] for site in summary["sites"]]) == ("finished", ["at the site"] * 3)
    assert summary["class_names"] == {"0": "cat", "1": "dog", "2": "owl"}  # as those call them that take part
    stores = store_folder(config)
    assert [bool(list(stores.rglob(f"{site.name}/*.safetensors"))) for site in config.roster] == [True, False, True]


def test_a_site_whose_table_has_its_columns_in_another_order_is_not_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    form = ["data.form={kind: features, task: class, shape: [2]}", "data.classes=2", "data.standardise=none"]
    config = federated(tmp_path, *form, "network={name: mlp, widths: [4]}")
    grid = OwnGrid(3, store_folder(config))
    rows = "\n".join(f"{row},{row % 7},{row % 2}" for row in range(40))
    for place, head in enumerate(("age,dose,sick", "dose,age,sick", "age,dose,sick")):
        (tmp_path / f"{place}.csv").write_text(f"{head}\n{rows}\n")
    grid.domains = tuple(f"table:{tmp_path}/{place}.csv?target=sick" for place in range(3))
    with caplog.at_level("INFO"):
        summary = run_experiment(grid, config, LogListener())
    assert "site-0001 is not asked: its column 0 is 'dose', but column 0 of site-0000 is 'age'" in caplog.text
    assert summary["status"] == "finished"


def clinics(tmp_path: Path, *words: str, query: str = "", columns: int = 4) -> tuple[OwnGrid, Config]:
    """A federation whose second site has another clinic."""
    tmp_path.mkdir(exist_ok=True)
    form = [f"data.form={{kind: features, task: class, shape: [{columns}]}}", "data.classes=2", "data.standardise=none"]
    config = federated(tmp_path, *form, "network={name: mlp, widths: [4]}", *words)
    grid = OwnGrid(3, store_folder(config))
    for place, clinic in enumerate(("south", "west", "south")):
        rows = "\n".join(f"{row},{('north', clinic, 'east')[row % 3]},{row % 2}" for row in range(40))
        (tmp_path / f"{place}.csv").write_text(f"age,clinic,sick\n{rows}\n")
    grid.domains = tuple(f"table:{tmp_path}/{place}.csv?target=sick{query}" for place in range(3))
    return grid, config


def test_the_option_with_all_sites_categories_is_printed_and_works(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO"):
        run_experiment(*clinics(tmp_path / "a"), LogListener())
    line = next(line for line in caplog.messages if "site-0001 is not asked" in line)
    assert "its table lacks clinic=south and has clinic=west, unlike site-0000; write ?categories=clinic:" in line
    option = line.partition("write ?")[2].partition(" in the domain of each site")[0]
    assert option == "categories=clinic:east|north|south|west"
    caplog.clear()
    with caplog.at_level("INFO"):
        with pytest.raises(FailedError):
            run_experiment(*clinics(tmp_path / "b", query=f"&{option}"), LogListener())
        assert "site-0001 is not asked: its table has 5 columns, but data.form.shape is [4]" in caplog.text
        run_experiment(*clinics(tmp_path / "c", query=f"&{option}", columns=5), LogListener())
    assert "round 1: 3 replies" in caplog.text


def test_a_site_that_hides_what_it_trains_names_no_category(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    masks = ("strategy={name: fedavg, weighting: equal}", "objective=fedavg", "federation.secure_aggregation=true")
    with caplog.at_level("INFO"), pytest.raises(FailedError):  # two sites are too few for masks
        run_experiment(*clinics(tmp_path, *masks), LogListener())
    line = next(line for line in caplog.messages if "site-0001 is not asked" in line)
    assert "has clinic=hidden" in line and "write ?categories=clinic:#16 in" in line
    assert not any(clinic in line for clinic in ("north", "south", "west", "east"))


def test_domains_that_share_outputs_must_name_them_alike(tmp_path: Path):
    domains = folders(tmp_path / "a", "cat", "dog"), folders(tmp_path / "b", "dog", "owl")
    sites = f"sites=[{{domain: '{domains[0]}'}}, {{domain: '{domains[1]}'}}, {{domain: digits}}]"
    with pytest.raises(UserError, match=r"data\.heads: class 0 is 'cat' in a and 'dog' in b\. Use the same classes"):
        num_classes(load("digits", [sites]))
    assert num_classes(load("digits", [sites, "data.heads=task"])) == 14


def test_names_that_are_numbers_are_names(tmp_path: Path):
    first, other = folders(tmp_path / "a", "0", "1", "2"), folders(tmp_path / "b", "1", "2")
    sites = f"sites=[{{domain: '{first}'}}, {{domain: '{other}'}}, {{domain: digits}}]"
    for heads in ([], ["data.classes=10"]):
        with pytest.raises(UserError, match=r"data\.heads: class 0 is '0' in a and '1' in b\. Use the same classes"):
            (site_sizes if heads else num_classes)(load("digits", [sites, *heads]))
    kept = f"sites=[{{domain: '{first}', classes: [1, 2], relabel: true}}, {{domain: '{other}'}}]"
    assert num_classes(load("digits", [kept])) == 2
    numbers = "sites=[{domain: digits, classes: [0, 1], relabel: true}, {domain: digits, classes: [2, 3], relabel: true}]"
    assert num_classes(load("digits", [numbers])) == 2


def test_fewer_outputs_than_classes_are_refused(tmp_path: Path):
    sites = "sites=[{domain: digits, classes: [0, 1, 2]}, {domain: digits}]"
    with pytest.raises(UserError, match=r"^data\.classes: got 3, but digits has 10 classes\. Set at least 10, or 0"):
        site_sizes(load("digits", [sites, "data.classes=3"]))
    few = "sites=[{domain: digits, classes: [0, 1, 2]}]"
    assert site_sizes(load("digits", [few, "data.classes=3"]))


def test_a_node_of_another_version_is_refused(tmp_path: Path):
    old = ClientApp()

    @old.query()
    def identify(message: Message, context: Context) -> Message:
        return Message(RecordDict({WHO: ConfigRecord({"partition-id": "0", "protocol": 0})}), reply_to=message)

    config = federated(tmp_path)
    federation = ClientChannel(InlineGrid(3, store_folder(config), old), config.roster, window=32)
    with pytest.raises(UserError, match="another version of fedloom's messages; install the server's version there"):
        federation.join(0.1)


class HidingGrid(OwnGrid):
    """Nodes of which some disclose their scores."""

    disclosing = 0
    policy: dict[str, str | float] = {}  # noqa: RUF012  # each test sets its own

    def context(self, message: Message) -> Context:
        context = super().context(message)
        known = {"disclose": "scores"} if int(context.node_config["partition-id"]) < self.disclosing else {}
        context.node_config = {**context.node_config, **self.policy, **known}
        return context


@pytest.mark.parametrize(
    ("words", "policy"),
    [(["federation.secure_aggregation=true"], {"min_known": 0}), (["privacy={clip: 1, noise: 0.5}"], {"epsilon": 1e6})],
)
@pytest.mark.parametrize("disclosing", [0, 1, 3])
def test_sites_that_hide_their_scores_are_reported_once_with_what_to_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, words: list[str], policy: dict[str, str | float], disclosing: int
):
    common = ["strategy=fedavg", "objective=fedavg", "rounds=2", "evaluation.every=1", "strategy.weighting=equal"]
    config = federated(tmp_path, *common, *words, "training.batch=10", "federation.min_replies=3")
    grid = HidingGrid(3, store_folder(config))
    grid.disclosing, grid.policy = disclosing, {**policy, "min_members": 3, "min_batch": 1}
    grid.domains = (folders(tmp_path / "images", "cat", "dog", "owl"),) * 3
    with caplog.at_level("INFO"):
        summary = run_experiment(grid, config, LogListener())
    lines = [line for line in caplog.messages if "send no scores" in line]
    silent = f"evaluation.where=sites: {3 - disclosing} of 3 sites send no scores (site-000{disclosing}: RefusedError at "
    assert len(lines) == (disclosing < 3) and all(silent in line for line in lines), caplog.messages
    assert all("(site.yaml: disclose: [scores]); evaluation.where=server measures" in line for line in lines)
    assert any(summary["accuracy"].values()) is bool(disclosing)
