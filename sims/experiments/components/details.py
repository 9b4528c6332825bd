"""Figures 5, 6, 8 and 9: norms, correlation of features, the point of the cut, and the number of common classes."""

from statistics import fmean
from typing import Any

from fedloom.sims.experiments.components.analyses import NOTE
from fedloom.sims.experiments.components.methods import ALL, DCC, IIW, INDEPENDENT, PULLS, WAYS
from fedloom.sims.experiments.components.runs import each, first_task, network_of, shown, size_of
from fedloom.sims.experiments.papers import cells
from fedloom.sims.experiments.plots import blocks, curves
from fedloom.sims.experiments.study import Study
from fedloom.sims.report.page import Part, Picture
from fedloom.sims.report.spread import spread

BOTH, TURNS = "IIW+DCC", "IIW+RP"
NORMS = {  # by the paper's row: settings, or the norm of all parts of the network
    "batch statistics": {},
    "statistics recomputed": {"evaluation.statistics": "recomputed"},
    "stored statistics": {"evaluation.statistics": "running"},
    "LayerNorm": {"norm": "layer"},
    "InstanceNorm": {"norm": "instance"},
    "unit-length features": {"unit": True},
    "loss for unit length": {"objective.unit": 0.001},  # with 0.1 and 0.01 training diverges
}
STORED = ("batch statistics", "stored statistics")  # also measured without IIW
CORRELATED = (INDEPENDENT, IIW, "RP", DCC, ALL)
CORRELATION_NOTE = (
    "Correlation of each channel of one extractor with the same channel of the other, mean over channels, on 500 "
    "test images of each domain and all positions. permuted: channels in the best order (a linear assignment). "
    "Accuracies in %, standard deviations over seeds. (paper): CIFAR-10 / STL-10, ResNet-56, where IIW starts from "
    "pre-trained weights."
)
EXCHANGED = "exchanged: test accuracy"  # the vertical axis


def figure5(study: Study) -> list[Part]:
    """Return Figure 5: norms and features of unit length, for IIW+DCC as in the paper, and for DCC."""
    (task, of), paper, rows = first_task(study), cells("components", "figure5"), []
    for heads, name in [*((BOTH, name) for name in NORMS), *((DCC, name) for name in STORED)]:
        settings = normed(study, task, NORMS[name])
        results = [each(study, task, {**WAYS[heads].pulled(pull), **settings}) for pull in PULLS.values()]
        theirs = paper.shown(name, "exchanged") if heads == BOTH else "-"
        ours = [text for what in ("exchanged", "own") for result in results for text in shown(result, what)]
        rows.append([f"{heads}, {name}", theirs, *ours])
    head = [
        "heads and norm",
        "exchanged (paper)",
        *(f"{what}, {column}" for what in ("exchanged", "own") for column in PULLS),
    ]
    return [study.table(f"Figure 5: norms, {of.title}", head, rows, NOTE)]


def normed(study: Study, task: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return settings for a norm of all parts of the network, or for features of unit length; other settings unchanged."""
    if not {"norm", "unit"} & chosen.keys():
        return chosen
    network = network_of(study, task)
    if "unit" in chosen:
        return {"network": {**network, **chosen}}
    head = {"head": {**network["head"], **chosen}} if network.get("head") else {}
    return {"network": {**network, "of": {**network["of"], **chosen}, **head}}


def figure6(study: Study) -> list[Part]:
    """Return Figure 6: the correlation of features, and compatibility."""
    (task, of), paper, rows, drawn = first_task(study), cells("components", "figure6"), [], {}
    for name in CORRELATED:
        for column, pull in WAYS[name].columns.items():
            results = each(study, task, WAYS[name].pulled(pull))
            title = f"{name}, {column}" if WAYS[name].pulls else name
            drawn[title] = results[0].correlation
            row = [title]
            for what, values in {"correlation": [fmean(result.correlation) for result in results],
                                 "permuted": [result.permuted for result in results]}.items():  # fmt: skip
                theirs = paper.shown(name, what) if not pull else "-"
                row.append(spread(values).text(2) + ("" if theirs == "-" else f" ({theirs})"))
            rows.append([*row, *shown(results, "exchanged")])
    head = ["heads", "correlation (paper)", "permuted (paper)", "exchanged"]
    picture = blocks(drawn, study.folder / "figure6.png")
    return [study.table(f"Figure 6: correlation of features, {of.title}", head, rows, CORRELATION_NOTE),
            Picture(picture, "Correlation of each channel, sorted; seed 0")]  # fmt: skip


def figure8(study: Study) -> list[Part]:
    """Return Figure 8: the point of the cut, for IIW+RP as in the paper, and for DCC. The head is the rest."""
    name, task = first_task(study)
    ways = {f"{heads}, {column}": WAYS[heads].pulled(pull) for heads in (TURNS, DCC)
            for column, pull in WAYS[heads].columns.items()}  # fmt: skip
    rows, drawn = [], {way: dict[str, list[float]]() for way in ways}
    for point in task.points:
        network = {"network": {"name": "split", "of": dict(task.whole), "at": point}}
        results = {way: each(study, name, {**settings, **network}) for way, settings in ways.items()}
        exchanged = [text for runs in results.values() for text in shown(runs, "exchanged")]
        rows.append([point, *exchanged, *shown(results[f"{DCC}, pulled"], "own")])
        for way, runs in results.items():
            drawn[way][point] = [run.exchanged for run in runs]
    head = ["cut after", *ways, f"own: {DCC}, pulled"]
    note = (
        f"{NOTE} The paper has no numbers. Its IIW+RP falls slowly up to the first block of stage 3, and steeply after it."
    )
    title = f"Figure 8: the point of the cut, {task.title}"
    picture = curves(drawn, ("cut after", EXCHANGED), study.folder / "figure8.png", limits=(0.0, 1.0))
    return [study.table(title, head, rows, note), Picture(picture, title)]


def figure9(study: Study) -> list[Part]:
    """Return Figure 9: the number of common classes of the shared head, for IIW+DCC, and IIW+RP without such a head."""
    (task, of), paper, rows = first_task(study), cells("components", "figure9"), []
    columns = {f"IIW+DCC, {column}": pull for column, pull in PULLS.items()}
    drawn = {name: dict[str, list[float]]() for name in columns}
    for most in size_of(study).most:
        limited = {"objective.auxiliary": [{"name": "dcc", "most": most}]}
        results = {name: each(study, task, {**WAYS[BOTH].pulled(pull), **limited}) for name, pull in columns.items()}
        exchanged = [text for runs in results.values() for text in shown(runs, "exchanged")]
        rows.append([str(most), *exchanged, paper.shown(most, "IIW+DCC")])
        for name, runs in results.items():
            drawn[name][str(most)] = [run.exchanged for run in runs]
    turns = each(study, task, WAYS[TURNS].settings)
    rows.append(["none: IIW+RP", *shown(turns, "exchanged"), "-", paper.shown("IIW+RP", "IIW+DCC")])
    title = f"Figure 9: common classes, {of.title}"
    picture = curves(
        drawn, ("common classes of the shared head", EXCHANGED), study.folder / "figure9.png", limits=(0.0, 1.0)
    )
    return [study.table(title, ["classes", *columns, "paper"], rows, NOTE), Picture(picture, title)]
