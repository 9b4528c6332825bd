"""Table 20: parameters and inference time of the fused network, and of ensembles of two, four and six."""

import statistics
import time

import torch
from torch import Tensor, nn

from fedloom.clients.data import to_float
from fedloom.clients.networks import parameter_count
from fedloom.fusion.baselines import Ensemble
from fedloom.sims.experiments.cla.methods import METHODS
from fedloom.sims.experiments.cla.runs import inputs_of, size_of
from fedloom.sims.experiments.papers import cells
from fedloom.sims.experiments.study import Study
from fedloom.sims.operations.domain_task import EVALUATION_BATCH, images, placed
from fedloom.sims.report.tables import Table

PAIR, COUNTS, REPEATS = "resnet", (2, 4, 6), 3
KINDS = ("A", "B", "fused", "ensemble")
NOTE = "Seconds for all test examples on this machine, median of three. (paper): ResNets of full width on an A100."


def table(study: Study) -> list[Table]:
    """Return Table 20: parameters and inference time, a row for each number of networks."""
    results = study.once("sizes", size_of(study).pairs[PAIR], lambda: _measured(study))
    paper, rows = cells("cla_ot", "20"), []
    for count in COUNTS:
        kinds = {**results, "ensemble": results[f"ensemble of {count}"]}
        rows.append([
            f"{count} networks",
            *(f"{kinds[kind][0] / 1e6:.3f}" for kind in KINDS), *(f"{kinds[kind][1]:.2f}" for kind in KINDS),
            *(paper.shown(f"{count} networks", f"{kind}, {what}") for what in ("parameters", "seconds")
              for kind in ("fused", "ensemble")),
        ])  # fmt: skip
    head = ["", *(f"{kind}, M parameters" for kind in KINDS), *(f"{kind}, s" for kind in KINDS),
            *(f"{kind}, {what} (paper)" for what in ("M parameters", "s") for kind in ("fused", "ensemble"))]  # fmt: skip
    return [Table("Table 20: size and inference time", head, rows, NOTE)]


def _measured(study: Study) -> dict[str, list[float]]:
    inputs = inputs_of(study, PAIR, 0)
    every = to_float(images(size_of(study).pairs[PAIR].task, "test").x)
    networks = {"A": inputs.deep, "B": inputs.shallow, "fused": METHODS["fuse"](inputs)}
    results = {kind: [parameter_count(network), _seconds(network, every)] for kind, network in networks.items()}
    for count in COUNTS:
        many = inputs.networks * (count // 2)
        results[f"ensemble of {count}"] = [sum(map(parameter_count, many)), _seconds(Ensemble(many), every)]
    return results


@torch.no_grad()
def _seconds(network: nn.Module, every: Tensor) -> float:
    spent = []
    with placed(network.eval()) as device:
        for _ in range(REPEATS):
            begin = time.perf_counter()
            for batch in every.split(EVALUATION_BATCH):
                network(batch.to(device)).cpu()
            spent.append(time.perf_counter() - begin)
    return statistics.median(spent)
