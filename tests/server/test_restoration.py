"""Restoring after a subtraction: the others train the aggregate as one network, and the sum stays exact."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedloom.clients.data import site_examples
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.training.learner import batches
from fedloom.conf import Config
from fedloom.fusion.state import State, moved_back
from fedloom.server.ledger.audit import check
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.rounds.listener import Listener
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.unlearning.certificate import CERTIFICATES
from fedloom.server.unlearning.fulfilment import RefusedError
from fedloom.server.unlearning.requests import SHARE_BACK, receive
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.report.certificates import write_html
from tests.server.masked import MASKS
from tests.server.parts import Recorder, WatchedApp, folder
from tests.server.runs import copied, method_of, verdicts
from tests.server.unlearnings import ONE, SITES, TWO, added_up, configured, run

EXACT = "objective.mode=exact"
PLAIN = "training={momentum: 0.0, batch: 8, rate: 0.1, schedule: {name: constant}}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished run of sum aggregation, which no test changes."""
    return run(configured(tmp_path_factory.mktemp("run"), EXACT, "objective.subset_probability=0.5", PLAIN))


def restored(
    config: Config, rounds: int, *sites: str, client: WatchedApp | None = None, listener: Listener | None = None
) -> None:
    """Fulfil a request for each site in turn, with this many rounds of restoration."""
    for site in sites:
        with method_of(config) as method:
            receive(method.ledger, f"without-{site}", [site], "", {"restore": rounds})
            train(config, method, client, listener)


def train(config: Config, method: Any, client: WatchedApp | None = None, listener: Listener | None = None) -> None:
    channel = ClientChannel(InlineGrid(SITES, store_folder(config), client or WatchedApp()), config.roster, 0)
    channel.join(5.0)
    method.train(channel, listener or Recorder(), rounds=0)


def one_step_of_fedavg(config: Config, mean: State, site: Any, round: int) -> State:
    """The network that a site trains by plain SGD, at twice the rate, from the mean."""
    with method_of(config) as method:
        network = method.evaluator.loaded(method.state.aggregate())
        network.load_state_dict(mean)
        network.train()
        optimizer = torch.optim.SGD(network.parameters(), lr=2 * 0.1)
        for _, images, labels in batches(
            site_examples(config, site), method.experiment, site, 1, torch.device("cpu"), (str(round),)
        ):
            optimizer.zero_grad()
            cross_entropy(network(images), labels).backward()
            optimizer.step()
        return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def test_a_round_of_restoration_is_fedavg_at_twice_the_rate_from_half_way_back(tmp_path: Path):
    no_pooling = "network={name: mlp, widths: [32]}"  # where rounding decides between two nearly equal values
    finished = run(configured(tmp_path / "run", EXACT, "objective.subset_probability=0.5", PLAIN, no_pooling))
    with method_of(copied(finished, tmp_path / "a")) as method:
        method.state.membership.forget([ONE], {})
        last, members = method.unlearning().last_round(), method.state.members()
        begin = moved_back(method.state.aggregate().state, initial_state(finished), SHARE_BACK)
    expected = [one_step_of_fedavg(finished, begin, site, last + 1) for site in members]
    config = copied(finished, tmp_path / "b")
    restored(config, 1, ONE)
    with method_of(config) as method:
        found = method.state.aggregate().state
    for name in found:
        mean = torch.stack([state[name] for state in expected]).mean(0)
        torch.testing.assert_close(found[name], mean, rtol=1e-3, atol=1e-5)


def test_the_sum_stays_exact_and_a_second_request_works(finished: Config, tmp_path: Path):
    config, client = copied(finished, tmp_path), WatchedApp()
    restored(config, 2, ONE, TWO, client=client)
    with method_of(config) as method:
        assert added_up(method) == method.state.digest()["sum"]
        assert [site.name for site in method.state.members()] == ["site-0000", "site-0003"]
    assert check(folder(config)) == []
    page = write_html(folder(config) / CERTIFICATES / f"without-{TWO}.json").read_text()
    assert "the network moved back by 50.0% of the way to its initial state" in page and "for 2 rounds" in page
    assert "after the further rounds" in page
    assert verdicts(config, f"without-{TWO}") == {"match"} or "mismatch" not in verdicts(config, f"without-{TWO}")
    orders = [(order.round, order.site, order.restoring, order.rounds, order.back) for order in client.orders]
    first, second = (1, 2, 0.5), (2, 2, 0.0)
    assert orders == [(round, site, *part) for round, sites, part in
                      ((3, (0, 2, 3), first), (4, (0, 2, 3), second), (5, (0, 3), first), (6, (0, 3), second))
                      for site in sites]  # fmt: skip
    records = RunFolder(folder(config)).metrics()
    assert [record.get("restored") for record in records.values()] == [None, None, 1, 2, 1, 2]


class Stopping(Recorder):
    """A listener that stops the server after a round."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def round_done(self, record: dict[str, Any]) -> None:
        super().round_done(record)
        if record["round"] == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [3, 4])
def test_a_restoration_that_is_interrupted_continues_with_the_same_bits(finished: Config, tmp_path: Path, after: int):
    whole, parts = copied(finished, tmp_path / "whole"), copied(finished, tmp_path / "parts")
    restored(whole, 3, ONE)
    with pytest.raises(KeyboardInterrupt):
        restored(parts, 3, ONE, listener=Stopping(after))
    with method_of(parts) as method:
        train(parts, method)
    with method_of(whole) as first, method_of(parts) as second:
        assert first.state.digest() == second.state.digest()
        request = second.ledger.request(f"without-{ONE}")
        assert request is not None and request.state == "verified"


def test_all_remaining_sites_take_part_even_if_a_round_asks_a_fraction(tmp_path: Path):
    config = run(configured(tmp_path, EXACT, "federation.fraction=0.5", "rounds=4"))
    listener = Recorder()
    restored(config, 2, ONE, listener=listener)
    assert listener.asked == [3, 3]


def test_fedavg_starts_half_way_back_and_masks_do_not_matter(tmp_path: Path):
    words = "strategy={name: fedavg, weighting: equal}", "objective={name: fedavg}"
    plain = run(configured(tmp_path / "plain", *words))
    masked = run(configured(tmp_path / "masked", *words, MASKS[1]))
    for config in (plain, masked):
        restored(config, 1, ONE)
    with method_of(plain) as method:
        saved = method.state.view().server_state("network")
        initial = initial_state(plain)
        assert all(not torch.equal(saved[name], initial[name]) for name in saved if saved[name].ndim > 1)
    with method_of(masked) as method:
        assert check(folder(masked)) == []
        assert [site.name for site in method.state.members()] == ["site-0000", "site-0002", "site-0003"]


@pytest.mark.parametrize("name", ["cla_ot", "heterofl"])
def test_networks_of_different_size_move_back_as_parts_of_one(tmp_path: Path, name: str):
    networks = [{"name": "mlp", "widths": [8, 8]}, {"name": "mlp", "widths": [8, 8, 8] if name == "cla_ot" else [16, 16]}]
    sites = [{"domain": "digits", "samples": 20, "network": networks[index % 2]} for index in range(SITES)]
    config = run(configured(tmp_path, f"sites={json.dumps(sites)}", f"network={json.dumps(networks[1])}",
                            f"objective={{name: {'heterogeneous' if name == 'cla_ot' else 'heterofl'}}}",
                            f"strategy={{name: {name}}}", "training.rate=0.0"))  # fmt: skip
    with method_of(config) as method:
        before = method.state.aggregate().state
    restored(config, 1, ONE)
    with method_of(config) as method:
        after, initial = method.state.aggregate().state, method.state.strategy.first_reference(method.state.view())  # type: ignore[attr-defined]
    for tensor in after:
        torch.testing.assert_close(after[tensor], torch.lerp(before[tensor], initial[tensor], 0.5), rtol=1e-4, atol=1e-6)
    assert check(folder(config)) == []


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (("objective.mode=regularised",), {}, "objective.mode=regularised has no restoration, only exact has"),
        ((EXACT, "federation.clip_change=1"), {}, "federation.clip_change limits"),
        (("strategy={name: scaffold}", "objective={name: scaffold}"), {}, "control variates do not fit"),
        ((EXACT,), {"rollback": True}, "--rollback trains again from before the sites joined; leave one out"),
    ],
)
def test_what_cannot_be_restored_is_refused_before_anything_changes(
    tmp_path: Path, words: tuple[str, ...], options: dict[str, Any], message: str
):
    config = run(configured(tmp_path, *words))
    with method_of(config) as method:
        digest = method.state.digest()
        request = receive(method.ledger, "r1", [ONE], "", {"restore": 2, **options})
        with pytest.raises(RefusedError, match=message):
            method.unlearning().apply(request)
        assert method.state.digest() == digest and len(method.state.members()) == SITES
