"""Measurements on finished runs of two tasks: a grid of coefficients, large coefficients, and several scales of fusion."""

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
    """The networks of a finished run of weight arithmetic.

    Attributes:
        evaluator: Measures networks on the run's domains.
        start: The weights from which all sites trained (theta_0 in the paper).
        ends: Each site's weights after training, in the order of the sites.
        domains: Each site's domain, in the same order.
    """

    evaluator: Evaluator
    start: State
    ends: list[State]
    domains: list[str]

    @classmethod
    def of(cls, config: Config) -> "Networks":
        """Read the networks of a finished run from its folder."""
        folder = RunFolder(Path(config.run.root) / config.run.name)
        with Ledger.open(folder.path, server=False) as ledger:
            aggregation = TrainingRun(config, folder, ledger, evaluator := Evaluator(config)).state
            models = aggregation.models()
            ends = [models[site.name].state for site in config.roster]
            start = start_of(aggregation.view())
        return cls(evaluator, start, ends, [label(site.spec) for site in config.roster])

    def measured(self, how: str, pairs: Sequence[Sequence[float]], split: str, most: int) -> list[list[float]]:
        """Return accuracies [pair][domain] of the networks combined with each pair of coefficients.

        `how`: GRADIENTS or WEIGHTS. `most`: images of each domain's `split` (0: all).
        """
        composer, results = Composer(self.evaluator.network, self.start, self.ends, how), []
        for pair in pairs:
            composer(pair)
            shares = self.evaluator.measure(split, most)
            results.append([shares[domain] for domain in self.domains])
        return results


def scales(networks: Networks) -> list[list[float]]:
    """Return test accuracies [scale][domain] of weighted fusion with alpha = beta, for each of SCALES."""
    return networks.measured(WEIGHTS, [(scale, scale) for scale in SCALES], "test", 0)


def pairs(networks: Networks, most: int) -> dict[str, list[list[float]]]:
    """Return test accuracies [pair][domain] for PAIRS of (alpha, beta), by what is combined: gradients or weights."""
    return {how: networks.measured(how, PAIRS, "test", most) for how in (GRADIENTS, WEIGHTS)}


def all_grids(networks: Networks, images: Mapping[str, int]) -> dict[str, dict[str, dict[str, Grid]]]:
    """Return accuracy grids by what is combined (gradients, weights), split and domain. `images`: their number by split."""
    return {
        how: {split: _grids(networks, how, split, most) for split, most in images.items()} for how in (GRADIENTS, WEIGHTS)
    }


def _grids(networks: Networks, how: str, split: str, most: int) -> dict[str, Grid]:
    size = len(STEPS)
    cells = networks.measured(how, [(alpha, beta) for alpha in STEPS for beta in STEPS], split, most)
    return {domain: [[cells[a * size + b][k] for b in range(size)] for a in range(size)]
            for k, domain in enumerate(networks.domains)}  # fmt: skip
