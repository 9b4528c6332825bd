"""Parts of the tests of averaging methods: three sites with digits, a network of a few weights, plain SGD."""

from pathlib import Path

from fedloom.conf import load
from fedloom.conf.schema import Config
from fedloom.fusion.state import State, digest
from fedloom.server.run.checks import check
from fedloom.server.strategies.defaults import with_default_objective
from tests.server.parts import Run, set_up

NETWORK_OF = {"plain": "network={name: mlp, widths: [8]}", "norms": "network={name: convnet, widths: [4], norm: batch}"}


def configured(root: Path, *words: str, network: str = "plain", sites: str = "count: 3, samples: 60") -> Config:
    fixed = [f"sites=[{{domain: digits, {sites}}}]", "data={size: 8, validation_limit: 50, test_limit: 100}",
             NETWORK_OF[network], "engine.name=inline", f"run.root={root}", "rounds=2",
             "training={batch: 16, rate: 0.1, momentum: 0.0, schedule: constant}"]  # fmt: skip
    config = with_default_objective(load("digits", [*fixed, *words]), [*fixed, *words])
    check(config)
    return config


def played(root: Path, *words: str, network: str = "plain", sites: str = "count: 3, samples: 60") -> Run:
    return set_up(configured(root, *words, network=network, sites=sites)).all_rounds()


def network_of(run: Run) -> State:
    return run.aggregate.aggregate().state


def same(one: Run, other: Run) -> bool:
    return digest(network_of(one)) == digest(network_of(other))
