"""Runs of two tasks, looked at: combinations over a grid of coefficients, and fused at several scales."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedloom.clients.data import label
from fedloom.conf.schema import Config
from fedloom.fusion.arithmetic import GRADIENTS, WEIGHTS, Composer
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.strategies.arithmetic import start_of

STEPS = [step / 10 for step in range(11)]  # of alpha and beta
PAIRS = ((0.2, 0.3), (2.0, 3.0), (20.0, 30.0), (0.5, 0.5), (5.0, 5.0), (50.0, 50.0))  # of alpha and beta: two ratios
SCALES = [0.1, 0.5, 1.0, 10.0, 50.0]  # alpha = beta, of weighted fusion

Grid = list[list[float]]  # accuracy by alpha (row) and beta


@dataclass(frozen=True)
class Networks:
    """theta_0 and the networks that two sites trained from it, with what measures them. `domains`: of the two sites."""

    evaluator: Evaluator
    start: State
    ends: list[State]
    domains: list[str]

    @classmethod
    def of(cls, config: Config) -> "Networks":
        """Those of a finished run."""
        folder = RunFolder(Path(config.run.root) / config.run.name)
        with Ledger.open(folder.path, server=False) as ledger:
            aggregation = TrainingRun(config, folder, ledger, evaluator := Evaluator(config)).state
            models = aggregation.models()
            ends = [models[site.name].state for site in config.roster]
            start = start_of(aggregation.view())
        return cls(evaluator, start, ends, [label(site.spec) for site in config.roster])

    def measured(self, composer: Composer, alphas: Sequence[float], split: str, most: int) -> list[float]:
        """Accuracy of a combination on the two domains."""
        composer(alphas)
        shares = self.evaluator.measure(split, most)
        return [shares[domain] for domain in self.domains]


def grids(networks: Networks, how: str, split: str, most: int) -> dict[str, Grid]:
    """By domain: the accuracy of each pair of coefficients."""
    composer = Composer(networks.evaluator.network, networks.start, networks.ends, how)
    cells = [[networks.measured(composer, (alpha, beta), split, most) for beta in STEPS] for alpha in STEPS]
    return {domain: [[cell[k] for cell in row] for row in cells] for k, domain in enumerate(networks.domains)}


def scales(networks: Networks) -> list[list[float]]:
    """Test accuracy on the two domains of alpha = beta in SCALES, weighted fusion."""
    composer = Composer(networks.evaluator.network, networks.start, networks.ends, WEIGHTS)
    return [networks.measured(composer, (scale, scale), "test", 0) for scale in SCALES]


def pairs(networks: Networks, most: int) -> dict[str, list[list[float]]]:
    """By way of combining: test accuracy on the two domains for each of PAIRS."""
    composers = {
        how: Composer(networks.evaluator.network, networks.start, networks.ends, how) for how in (GRADIENTS, WEIGHTS)
    }
    return {how: [networks.measured(composer, pair, "test", most) for pair in PAIRS] for how, composer in composers.items()}


def all_grids(networks: Networks, images: Mapping[str, int]) -> dict[str, dict[str, dict[str, Grid]]]:
    """By way of combining, split and domain; `images`: how many of each domain are looked at, by split."""
    return {
        how: {split: grids(networks, how, split, most) for split, most in images.items()} for how in (GRADIENTS, WEIGHTS)
    }
