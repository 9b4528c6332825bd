"""Figures 5, 6, 8 and 9: norms, correlation of features, where networks are cut, how many classes are common."""

from typing import Any

from fedloom.conf.formatting import count
from fedloom.sims.experiments.components.analyses import NOTE
from fedloom.sims.experiments.components.methods import ALL, DCC, IIW, INDEPENDENT, PULLS, WAYS
from fedloom.sims.experiments.components.plots import blocks, curves
from fedloom.sims.experiments.components.study import ComponentsStudy, shown
from fedloom.sims.experiments.papers import cells
from fedloom.sims.report.page import Part, Picture
from fedloom.sims.report.spread import spread
from fedloom.sims.report.tables import Table

BOTH, TURNS = "IIW+DCC", "IIW+RP"
NORMS = {  # by the paper's row: settings, or which norm all parts of the network have
    "batch statistics": {},
    "statistics recomputed": {"evaluation.statistics": "recomputed"},
    "stored statistics": {"evaluation.statistics": "running"},
    "LayerNorm": {"norm": "layer"},
    "InstanceNorm": {"norm": "instance"},
    "unit-length features": {"unit": True},
    "loss for unit length": {"objective.unit": 0.001},  # with 0.1 and 0.01 training diverges
}
STORED = ("batch statistics", "stored statistics")  # looked at without IIW, too
CORRELATED = (INDEPENDENT, IIW, "RP", DCC, ALL)
CORRELATION_NOTE = (
    "Correlation of each channel of one extractor with the same one of the other, mean over channels; 500 test images of "
    "each domain, all places. permuted: channels in the best order (a linear assignment). Accuracies in %. Standard "
    "deviations over seeds. (paper): CIFAR-10 / STL-10, ResNet-56; IIW there from pre-trained weights."
)


def figure5(study: ComponentsStudy, seeds: int) -> list[Part]:
    """What BatchNorm works with, other norms, and features of unit length: IIW+DCC as in the paper, and DCC."""
    task, paper, rows = study.first, cells("components", "figure5"), []
    for heads, name in [*((BOTH, name) for name in NORMS), *((DCC, name) for name in STORED)]:
        settings = normed(study, task, NORMS[name])
        results = [study.each(task, {**WAYS[heads].pulled(pull), **settings}, seeds) for pull in PULLS.values()]
        theirs = paper.shown(name, "exchanged") if heads == BOTH else "-"
        rows.append([f"{heads}, {name}", theirs, *(shown(result, "exchanged") for result in results),
                     *(shown(result, "own") for result in results)])  # fmt: skip
    columns = [f"{what}, {column}" for what in ("exchanged", "own") for column in PULLS]
    head = ["heads and norm", "exchanged (paper)", *columns]
    return [Table(f"Figure 5: norms, {study.size.tasks[task].title}, {count(seeds, 'seed')}", head, rows, NOTE)]


def normed(study: ComponentsStudy, task: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Settings for a norm of all parts of the network, or features of unit length; or what was chosen, as it is."""
    if not {"norm", "unit"} & chosen.keys():
        return chosen
    network = study.network(task)
    if "unit" in chosen:
        return {"network": {**network, **chosen}}
    head = {"head": {**network["head"], **chosen}} if network.get("head") else {}
    return {"network": {**network, "of": {**network["of"], **chosen}, **head}}


def figure6(study: ComponentsStudy, seeds: int) -> list[Part]:
    """Correlation of features beside compatibility."""
    task, paper, rows, drawn = study.first, cells("components", "figure6"), [], {}
    for name in CORRELATED:
        for column, pull in WAYS[name].columns.items():
            results = study.each(task, WAYS[name].pulled(pull), seeds)
            same = [sum(result.correlation) / len(result.correlation) for result in results]
            title = f"{name}, {column}" if WAYS[name].pulls else name
            drawn[title] = results[0].correlation
            ours = {"correlation": spread(same), "permuted": spread([result.permuted for result in results])}
            numbers = [
                _beside(around.text(2), paper.shown(name, what) if not pull else "-") for what, around in ours.items()
            ]
            rows.append([title, *numbers, shown(results, "exchanged")])
    head = ["heads", "correlation (paper)", "permuted (paper)", "exchanged"]
    title = f"Figure 6: correlation of features, {study.size.tasks[task].title}, {count(seeds, 'seed')}"
    picture = blocks(drawn, study.folder / "figure6.png")
    return [Table(title, head, rows, CORRELATION_NOTE), Picture(picture, "Correlation of each channel, sorted; seed 0")]


def _beside(text: str, theirs: str) -> str:
    return text if theirs == "-" else f"{text} ({theirs})"


def figure8(study: ComponentsStudy, seeds: int) -> list[Part]:
    """Where a network is cut; heads are its rest: IIW+RP as in the paper, and DCC."""
    task = study.size.tasks[study.first]
    ways = {f"{name}, {column}": WAYS[name].pulled(pull) for name in (TURNS, DCC)
            for column, pull in WAYS[name].columns.items()}  # fmt: skip
    rows, drawn = [], {name: dict[str, list[float]]() for name in ways}
    for point in task.points:
        network = {"network": {"name": "split", "of": dict(task.whole), "at": point}}
        results = {name: study.each(study.first, {**settings, **network}, seeds) for name, settings in ways.items()}
        rows.append(
            [point, *(shown(result, "exchanged") for result in results.values()), shown(results[f"{DCC}, pulled"], "own")]
        )
        for name, result in results.items():
            drawn[name][point] = [each.exchanged for each in result]
    head = ["cut after", *ways, f"own: {DCC}, pulled"]
    note = f"{NOTE} The paper has no numbers: IIW+RP falls slowly up to the first block of stage 3, steeply behind it."
    title = f"Figure 8: the point of the cut, {task.title}, {count(seeds, 'seed')}"
    picture = curves(drawn, "cut after", study.folder / "figure8.png")
    return [Table(title, head, rows, note), Picture(picture, title)]


def figure9(study: ComponentsStudy, seeds: int) -> list[Part]:
    """How many of the common classes the shared head tells apart: IIW+DCC; beside it IIW+RP, which needs none."""
    task, paper, rows = study.first, cells("components", "figure9"), []
    columns = {f"IIW+DCC, {column}": pull for column, pull in PULLS.items()}
    drawn = {name: dict[str, list[float]]() for name in columns}
    for most in study.size.most:
        limited = [{"name": "dcc", "most": most}]
        results = {name: study.each(task, {**WAYS[BOTH].pulled(pull), "objective.auxiliary": limited}, seeds)
                 for name, pull in columns.items()}  # fmt: skip
        rows.append([str(most), *(shown(result, "exchanged") for result in results.values()), paper.shown(most, "IIW+DCC")])
        for name, result in results.items():
            drawn[name][str(most)] = [each.exchanged for each in result]
    turns = shown(study.each(task, WAYS[TURNS].settings, seeds), "exchanged")
    rows.append(["none: IIW+RP", turns, "-", paper.shown("IIW+RP", "IIW+DCC")])
    title = f"Figure 9: common classes, {study.size.tasks[task].title}, {count(seeds, 'seed')}"
    picture = curves(drawn, "common classes of the shared head", study.folder / "figure9.png")
    return [Table(title, ["classes", *columns, "paper"], rows, NOTE), Picture(picture, title)]
