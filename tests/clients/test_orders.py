"""What a server sends to a site: nothing is looked up, nothing is a path, and errors tell nothing of the site's own."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedloom.clients.app import app
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.protocol.messages import (
    CONFIG,
    LOST,
    MEAN,
    ORDER,
    TaskInstructions,
    config_digest,
    text_record,
    to_arrays,
)
from fedloom.conf import Config, UserError, load, to_json
from fedloom.conf.loading import from_json
from fedloom.sims.engines.adapter import site_context, take_identity

SECRET = "xyzzy-4711"
WORDS = ["sites=[{domain: digits, count: 2, samples: 20}]", "data.size=8", "network.width=0.25", "rounds=2"]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load("digits", [*WORDS, f"run.root={tmp_path / 'server'}"])


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", SECRET)


def asked(begun: Config, store: str, **given: Any) -> Message:
    """A site's reply to an order, some of whose parts are other ones; it has no node-config but its store."""
    take_identity()
    text = given.pop("text", None) or to_json(begun)
    parts = {"run": "run", "site": 1, "round": 1, "rounds": 2, "base": 0, "members": 2} | given
    order = ConfigRecord({"json": json.dumps({"config": config_digest(text), **parts})})
    content = {ORDER: order, MEAN: to_arrays(initial_state(begun)), CONFIG: text_record(text)}
    message = Message(RecordDict(content), 3, "train")
    message.metadata.__dict__["_message_id"] = "1"
    context = site_context(1, 2, store)
    context.node_config = {"partition-id": 1, **({"store": store} if store else {})}
    return app(message, context)


def altered(config: Config, key: str, item: Any) -> str:
    """The configuration as JSON, with something else at a dotted key."""
    tree = json.loads(to_json(config))
    *path, last = key.split(".")
    place = tree
    for part in path:
        place = place[int(part) if part.isdigit() else part]
    place[last] = item
    return json.dumps(tree)


@pytest.mark.parametrize(
    "key", ["data.root", "sites.0.domain", "sites.0.name", "network.name", "seed", "run.name", "experiment"]
)
@pytest.mark.parametrize("text", ["${oc.env:SECRET}", "a${oc.env:SECRET}b", "${seed}", "???"])
def test_nothing_that_a_server_sends_is_looked_up_at_the_site(tmp_path: Path, config: Config, key: str, text: str):
    reply = asked(config, str(tmp_path / "store"), text=altered(config, key, text))
    assert reply.has_error()
    assert SECRET not in str(reply.error.reason)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["site.lock"]


@pytest.mark.parametrize("text", ["${oc.env:SECRET}", "${seed}", "${"])
def test_a_configuration_from_elsewhere_with_an_interpolation_is_refused_by_its_key(config: Config, text: str):
    with pytest.raises(UserError, match=r"^data\.root: contains '\$\{', which is not interpolated here") as caught:
        from_json(altered(config, "data.root", text))
    assert SECRET not in str(caught.value)


def test_what_a_users_own_file_looks_up_is_looked_up_once_where_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = (Path(__file__).parents[2] / "conf" / "digits.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("data: {size: 16}", 'data: {size: 16, root: "${oc.env:SECRET}"}'))
    assert load(str(tmp_path / "mine.yaml")).data.root == SECRET
    monkeypatch.setenv("SECRET", "${oc.env:HOME}")
    with pytest.raises(UserError, match=r"data\.root: contains"):
        load(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    "run",
    [
        "../../escaped",
        "/tmp/escaped",
        "..",
        ".",
        "",
        "a/b",
        "a\\b",
        ".hidden",
        "x" * 300,
        "a\nb",
        "${oc.env:SECRET}",
        7,
        None,
    ],
)
def test_a_runs_name_is_not_a_path(tmp_path: Path, config: Config, run: Any):
    reply = asked(config, str(tmp_path / "deep" / "store"), run=run)
    assert reply.has_error()
    assert "UserError at order" in str(reply.error.reason)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *(("round", value) for value in (-5, 0, 10**9, "1", 1.5, True, None, "../x")),
        *(("base", value) for value in (-1, "0", 10**9)),
        *(("site", value) for value in (-1, 2, 10**6, "1")),
        ("members", "2"),
        ("config", 5),
    ],
)
def test_numbers_of_an_order_are_numbers_that_can_be(tmp_path: Path, config: Config, part: str, value: Any):
    reply = asked(config, str(tmp_path / "store"), **{part: value})
    assert reply.has_error()
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"x"', '{"run": 1}'])
def test_an_order_that_is_none_is_reported(tmp_path: Path, config: Config, text: str):
    take_identity()
    message = Message(RecordDict({ORDER: ConfigRecord({"json": text})}), 3, "train")
    message.metadata.__dict__["_message_id"] = "1"
    reply = app(message, site_context(1, 2, str(tmp_path)))
    assert "order: cannot be read" in str(reply.error.reason)


def test_without_a_store_of_its_own_a_site_keeps_its_states_where_it_was_started(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
):
    """And not where the server's run.root points to."""
    (tmp_path / "site").mkdir()
    monkeypatch.chdir(tmp_path / "site")
    reply = asked(config, "")
    assert not reply.has_error(), reply.error
    assert not (tmp_path / "server").exists()
    store = tmp_path / "site" / "fedloom-store" / "run" / "site-0001"
    assert {path.name for path in store.iterdir()} == {"objective", "round-000001.safetensors"}


def test_what_leaves_a_site_in_an_error_is_of_known_parts_and_its_log_has_the_rest(
    tmp_path: Path, config: Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    private = tmp_path / "patients"
    private.mkdir()
    (private / "usps.npz").write_bytes(b"broken")
    monkeypatch.setenv("FEDLOOM_DATA", str(private))
    other = load("digits", [*WORDS, "sites=[{domain: digits},{domain: usps}]"])
    with caplog.at_level(logging.ERROR, logger="fedloom.site"):
        reply = asked(other, str(tmp_path / "store"))
    reason = str(reply.error.reason)
    assert "patients" not in reason
    assert "the site's own log says more" in reason
    assert "usps.npz" in caplog.text


def test_where_the_data_are_is_the_sites_own_affair(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch):
    """And whether they are fetched: an order that names folders of a site neither reads nor makes any."""
    elsewhere = tmp_path / "made" / "by" / "server"
    text = altered(config, "data.root", str(elsewhere))
    text = json.dumps(json.loads(text) | {"data": {**json.loads(text)["data"], "download": True}})
    assert not asked(config, str(tmp_path / "store"), text=text).has_error()
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    for root in ("/root/.ssh", "/nonexistent", str(elsewhere)):
        other = altered(config, "sites.0.domain", "usps")
        other = json.dumps(json.loads(other) | {"data": {**json.loads(other)["data"], "root": root, "download": True}})
        assert str(asked(config, str(tmp_path), text=other).error.reason) == "UserError; the site's own log says more"
    assert not elsewhere.exists()


def test_the_option_at_fault_is_named(tmp_path: Path, config: Config):
    text = altered(config, "sites.0.samples", 10**6)
    assert "the site's own log says more" in str(asked(config, str(tmp_path), config=text).error.reason)
    reason = str(asked(config, str(tmp_path), text=altered(config, "training.rate", -1)).error.reason)
    assert reason == "UserError at training.rate; the site's own log says more"


def test_a_loss_that_is_not_finite_is_reported_whole(tmp_path: Path, config: Config):
    words = ["network={name: conv6, norm: none, width: 0.25}", "training.rate=3e38", "training.epochs=5"]
    reply = asked(load("digits", [*WORDS, *words]), str(tmp_path))
    assert "site-0001: the loss is" in str(reply.error.reason)
    assert "training.rate" in str(reply.error.reason)


def test_a_site_without_its_state_says_so_in_a_record_of_its_own(tmp_path: Path, config: Config):
    reply = asked(config, str(tmp_path), round=4, base=3)
    assert not reply.has_error()
    assert reply.content.config_records[LOST]["round"] == 3
    assert not reply.content.array_records


def test_sites_of_a_simulation_tell_the_user_everything(tmp_path: Path, config: Config):
    take_identity()
    text = altered(config, "sites.0.samples", 10**6)
    order = TaskInstructions(config_digest(text), "run", site=1, round=1, rounds=2, base=0, members=2)
    content = {ORDER: order.record(), MEAN: to_arrays(initial_state(config)), CONFIG: text_record(text)}
    message = Message(RecordDict(content), 3, "train")
    message.metadata.__dict__["_message_id"] = "1"
    context: Context = site_context(1, 2, str(tmp_path))
    assert "samples=1000000, but" in str(app(message, context).error.reason)
