"""Aggregates set right after forgetting by what sites tell: beside the sums, and no longer than they stay as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, MetricRecord
from flwr.clientapp import ClientApp

from fedloom.clients.app import app
from fedloom.clients.data import Examples, site_examples, to_float
from fedloom.clients.evaluation.statistics import (
    CLASS_STATISTICS,
    COUNT,
    MEAN_OF,
    SQUARE,
    SQUARE_OF,
    SUM,
    check_moments,
    class_statistics,
    moments,
)
from fedloom.clients.networks import architecture_of, initialise
from fedloom.clients.protocol.messages import METRICS, read_order, to_arrays, to_states
from fedloom.clients.protocol.reply_checks import ReplyError
from fedloom.conf import Config
from fedloom.fusion.cla_ot.repair import recompute_statistics
from fedloom.fusion.discriminant import discriminant
from fedloom.server.ledger.audit import check
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.unlearning.requests import receive
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.server.arithmetics import same
from tests.server.parts import Recorder, folder
from tests.server.runs import copied, method_of
from tests.server.unlearnings import ONE, SITES, configured, run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run, which no test changes."""
    return run(configured(tmp_path_factory.mktemp("run")))


def recalibrated(config: Config, client: ClientApp = app) -> Config:
    with method_of(config) as method:
        receive(method.ledger, "r1", [ONE], "", {"recalibrate": True})
        federation = ClientChannel(InlineGrid(SITES, store_folder(config), client), config.roster, 0)
        federation.join(5.0)
        method.train(federation, Recorder(), rounds=0)
        request = method.ledger.request("r1")
        assert request is not None and request.state == "verified"
    return config


def last_record(config: Config) -> dict[str, Any]:
    with method_of(config) as method:
        return method.ledger.rounds()[-1].record or {}


def test_the_head_is_the_discriminant_of_the_others_images_and_the_sums_stay(finished: Config, tmp_path: Path):
    config = copied(finished, tmp_path / "a")
    with method_of(copied(finished, tmp_path / "b")) as plain:
        plain.state.membership.forget([ONE], {})
        digest, model = plain.state.digest(), plain.state.aggregate()
        network = plain.evaluator.loaded(model)
        images = [site_examples(config, site) for site in plain.state.members()]
        whole = Examples(torch.cat([one.x for one in images]), torch.cat([one.y for one in images]))
        found = class_statistics(network, whole, 0, 500, CPU)
    recalibrated(config)
    with method_of(config) as method:
        assert method.state.digest() == digest and check(folder(config)) == []
        state = method.state.aggregate().state
        weight, bias = discriminant(found[COUNT], found[SUM], found[SQUARE])
        assert torch.allclose(state["head.weight"].double(), weight, rtol=1e-3, atol=1e-3)
        assert torch.allclose(state["head.bias"].double(), bias, rtol=1e-3, atol=1e-3)
        assert same({k: v for k, v in state.items() if not k.startswith("head.")},
                    {k: v for k, v in model.state.items() if not k.startswith("head.")})  # fmt: skip
        rest = method.state.without(["site-0000"])
        assert rest is not None and torch.equal(rest.state["head.bias"], model.state["head.bias"])
    assert last_record(config)["recalibrated"] and last_record(config)["replies"] == SITES - 1


def test_the_next_round_and_a_readmission_end_it(finished: Config, tmp_path: Path):
    config = recalibrated(copied(finished, tmp_path))
    with method_of(config) as method:
        head = method.state.aggregate().state["head.weight"]
        method.state.readmit([ONE])
        assert not torch.equal(method.state.aggregate().state["head.weight"], head)
        shared = method.state.view().server_state("shared")["head.weight"]
        assert torch.equal(method.state.aggregate().state["head.weight"], shared)


def test_statistics_of_several_sites_are_those_of_all_images(finished: Config):
    network = architecture_of(finished).build()
    initialise(network, torch.Generator().manual_seed(1))
    network.eval()
    images = site_examples(finished, finished.roster[0])
    half = len(images) // 3
    parts = [Examples(images.x[:half], images.y[:half]), Examples(images.x[half:], images.y[half:])]
    whole, each = (
        class_statistics(network, images, 0, 7, CPU),
        [class_statistics(network, one, 0, 500, CPU) for one in parts],
    )
    for name, wanted in whole.items():
        summed = [one[name] * (len(part) / len(images)) for one, part in zip(each, parts, strict=True)]
        assert torch.allclose(torch.stack(summed).sum(0), wanted, atol=1e-6)


def test_moments_of_batchnorm_are_those_of_recomputing_and_leave_the_network(tmp_path: Path):
    config = configured(tmp_path, "network={name: conv6, norm: batch}", "objective={name: local}",
                        "strategy={name: arithmetic}")  # fmt: skip
    network, images = architecture_of(config).build(), site_examples(config, config.roster[0])
    initialise(network, torch.Generator().manual_seed(1))
    network.eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    found = moments(network, images, 500, CPU)
    assert same(dict(network.state_dict()), before) and not network.training
    recompute_statistics(network, [to_float(images.x)])
    name = next(name for name in before if name.endswith("running_mean")).removesuffix(".running_mean")
    state = network.state_dict()
    assert torch.allclose(found[MEAN_OF + name].float(), state[f"{name}.running_mean"], atol=1e-5)
    variance = (found[SQUARE_OF + name] - found[MEAN_OF + name].square()).float()
    assert torch.allclose(variance, state[f"{name}.running_var"], rtol=0.1)


def test_what_a_site_makes_up_is_dropped_and_named(finished: Config, tmp_path: Path):
    config = recalibrated(copied(finished, tmp_path), Forging("site-0002"))
    record = last_record(config)
    assert record["replies"] == SITES - 2 and "claims 1000000 samples" in record["dropped"]["site-0002"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (COUNT, -1.0, "shares of"),
        (COUNT, 1000.0, "shares of"),
        (SUM, 9000.0, "larger than"),
        (SQUARE, -9000.0, "semidefinite"),
    ],
)
def test_statistics_that_no_images_have_are_dropped(finished: Config, tmp_path: Path, name: str, value: float, message: str):
    config = recalibrated(copied(finished, tmp_path), Forging("site-0002", name, value))
    record = last_record(config)
    assert record["replies"] == SITES - 2 and message in record["dropped"]["site-0002"]


def test_moments_that_no_images_have_are_reported():
    with pytest.raises(ReplyError, match="larger than its mean square"):
        check_moments({MEAN_OF + "n": torch.ones(2), SQUARE_OF + "n": torch.tensor([2.0, 0.5])})


class Forging(ClientApp):
    """The real ClientApp, but one site claims more images than it has, or (`name`) makes up its statistics."""

    def __init__(self, site: str, name: str = "", value: float = 0.0) -> None:
        super().__init__()
        self.site, self.name, self.value = site, name, value

    def __call__(self, message: Message, context: Context) -> Message:
        reply = app(message, context)
        if CLASS_STATISTICS in reply.content.array_records and read_order(message.content).site == int(self.site[-4:]):
            if self.name:
                given = to_states(reply.content)[CLASS_STATISTICS]
                reply.content[CLASS_STATISTICS] = to_arrays(
                    given | {self.name: torch.full_like(given[self.name], self.value)}
                )
            else:
                reply.content[METRICS] = MetricRecord({"samples": 10**6})
        return reply
