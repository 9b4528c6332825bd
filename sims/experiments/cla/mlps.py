"""Tables 9 and 10: the map of layers for two MLPs, and the accuracy of the network fused by every map."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedloom.fusion.cla_ot.matching import layer_costs, optimal_alignment
from fedloom.fusion.graph.channels import wire
from fedloom.fusion.pipeline import fuse
from fedloom.sims.experiments.cla import starts
from fedloom.sims.experiments.cla.methods import REFERENCE, Inputs
from fedloom.sims.experiments.cla.runs import inputs_of, size_of
from fedloom.sims.experiments.papers import cells
from fedloom.sims.experiments.study import Study, means
from fedloom.sims.operations.domain_task import Task, accuracy
from fedloom.sims.report.tables import Table

PAIR = "mlp"
COMPARISONS = ("neurons", "cka", "wasserstein")
PINS = {"both pinned": (True, True), "last pinned": (False, True), "first pinned": (True, False),
        "none pinned": (False, False)}  # fmt: skip
WAYS = {"layers added": (0, "sum"), "merged, sum": (1, "sum"), "merged, majority": (1, "majority"),
        "merged, average": (1, "average")}  # fmt: skip


def tables(study: Study) -> list[Table]:
    """Return Tables 9 and 10, and a comparison of starts."""
    results = study.each_seed(lambda seed: measured(study, seed))
    return [nine(study, results), ten(study, results), *starts.tables(study, starts.TEN)]


def measured(study: Study, seed: int) -> dict[str, Any]:
    """Return the result of `ablation` for a seed, saved or new."""
    pair, probe = size_of(study).pairs[PAIR], size_of(study).probe
    return study.once(f"maps-{seed}", [pair, probe], lambda: ablation(inputs_of(study, PAIR, seed), pair.task))


def ablation(inputs: Inputs, task: Task) -> dict[str, Any]:
    """Return {"maps": best map by comparison and constraint, "ways": by map, test accuracies in the order of WAYS}."""
    maps: dict[str, dict[str, str]] = {}
    for name in COMPARISONS:
        kind = {"representation": name} if name == "neurons" else {"dissimilarity": name}
        costs = layer_costs(inputs.deep, inputs.shallow, inputs.probe, **kind)
        maps[name] = {pins: _text(optimal_alignment(costs, pin_first=first, pin_last=last))
                      for pins, (first, last) in PINS.items()}  # fmt: skip
    many, few = (len(wire(network, inputs.probe[:1]).units) for network in (inputs.deep, inputs.shallow))
    every = itertools.combinations(range(many), few)
    return {"maps": maps, "ways": {_text(chosen): _by_way(inputs, chosen, task) for chosen in every}}


def _by_way(inputs: Inputs, chosen: Sequence[int], task: Task) -> list[float]:
    reached = []
    for depth, relu in WAYS.values():
        way = replace(REFERENCE, relu=relu, map=tuple(chosen))
        network = fuse(inputs.networks, into=1, depth=depth, probe=inputs.probe, settings=way).network
        reached.append(accuracy(network, task, "test"))
    return reached


def _text(chosen: Sequence[int]) -> str:
    return "-".join(str(row + 1) for row in chosen)


def nine(study: Study, results: Sequence[Mapping[str, Any]]) -> Table:
    """Return Table 9, the maps, from the results of all seeds."""
    paper, rows = cells("cla_ot", "9"), []
    for name in COMPARISONS:
        ours = [", ".join(sorted({result["maps"][name][pins] for result in results})) for pins in PINS]
        rows.append([name, *ours, *(paper.shown(name, pins) for pins in PINS)])
    head = ["comparison", *PINS, *(f"{pins} (paper)" for pins in PINS)]
    note = "Layers count from 1. Several maps: seeds differ. ?: the paper has 1-2-5 at one of its seeds."
    return study.table("Table 9: the maps for two MLPs", head, rows, note)


def ten(study: Study, results: Sequence[Mapping[str, Any]]) -> Table:
    """Return Table 10, the accuracy by map, from the results of all seeds."""
    paper, theirs, rows = cells("cla_ot", "10"), [way for way in WAYS if way != "merged, majority"], []
    for name in results[0]["ways"]:
        ours = means(results, *(("ways", name, index) for index in range(len(WAYS))))
        rows.append([name, *ours, *(paper.shown(name, way) for way in theirs)])
    head = ["map", *WAYS, *(f"{way} (paper)" for way in theirs)]
    note = "Test accuracy in % of CLAFusion, without fine-tuning. (paper): all of MNIST."
    return study.table("Table 10: two MLPs fused by every map", head, rows, note)
