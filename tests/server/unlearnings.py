"""Parts of the tests of forgetting: small runs of four sites, and what is looked at in them."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from fedloom.clients.objectives.modes import mode_of
from fedloom.conf import Config
from fedloom.fusion.exact import exact
from fedloom.fusion.state import digest
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger, Request
from fedloom.server.ledger.audit import check
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.unlearning.fulfilment import Unlearning
from fedloom.server.unlearning.requests import receive
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.server.parts import Recorder, WatchedApp, folder, small
from tests.server.runs import method_of

SITES = 4
ONE, TWO, THREE = "site-0001", "site-0002", "site-0003"


def configured(root: Path, *words: str) -> Config:
    return small(root, *words, sites=SITES, samples=20)


def run(config: Config, listener: Recorder | None = None, client: WatchedApp | None = None) -> Config:
    run_experiment(InlineGrid(SITES, store_folder(config), client or WatchedApp()), config, listener or Recorder())
    return config


def further(method: TrainingRun, config: Config, rounds: int, client: WatchedApp) -> None:
    """Train some more rounds."""
    method.config = dataclasses.replace(config, rounds=rounds)
    method.evaluator = Evaluator(method.config)
    federation = ClientChannel(InlineGrid(SITES, store_folder(config), client), config.roster, 0)
    federation.join(5.0)
    method.train(federation, Recorder())


def kinds(ledger: Ledger, id: str) -> list[str]:
    """The events about a request."""
    return [event.kind for event in ledger.events() if event.body.get("id") == id]


def added_up(method: TrainingRun) -> str:
    """The digest of the remaining contributions' sum, added up by torch alone."""
    states = [exact(method.ledger.blobs.get(one.blob), 32) for one in method.ledger.all_latest().values()]
    whole = {name: sum((state[name] for state in states), torch.zeros((), dtype=torch.int64)) for name in states[0]}
    return digest(mode_of(method.experiment.objective).summed_part(whole))


def asked(unlearning: Unlearning, id: str, sites: list[str], reason: str = "") -> Request:
    return receive(unlearning.ledger, id, sites, reason, {})


def fulfil(unlearning: Unlearning, request: Request) -> dict[str, Any]:
    """Apply and certify a request that wants nothing to be trained; the certificate."""
    return unlearning.certify(unlearning.apply(request))


def forget(config: Config, *requests: list[str]) -> str:
    """Forget these sites, request by request; the digest of the sum."""
    with method_of(config) as method:
        unlearning = method.unlearning()
        for sites in requests:
            fulfil(unlearning, asked(unlearning, "-".join(sites), sites))
        assert added_up(method) == method.state.digest()["sum"]
        assert {site.name for site in method.state.members()} == method.ledger.all_latest().keys()
    assert check(folder(config)) == []
    with Ledger.open(folder(config), server=False) as ledger:
        last = ledger.last_round()
    assert last is not None
    return last.digest["sum"]
