"""Tables 1, 2, 3, 4, 11, 12 and 18: networks of different starts, before and after the same fine-tuning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedloom.sims.experiments.cla.methods import VGG_MAPS
from fedloom.sims.experiments.cla.runs import Reached, reached, size_of
from fedloom.sims.experiments.papers import cells
from fedloom.sims.experiments.plots import dots
from fedloom.sims.experiments.study import Study
from fedloom.sims.report.page import Part, Picture
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table

NOTE = (
    "Test accuracy in %, mean and standard deviation over seeds. tuned: after {epochs} epochs at a rate that falls "
    "from {rate:g} to 0 (random starts: from {fresh:g}), with the same batches for all. A: {deep}; B: {shallow}. "
    "(paper): full width, all images."
)


@dataclass(frozen=True)
class Row:
    """A row of a fine-tuning table: one way to make the network from which fine-tuning starts.

    Attributes:
        method: The name of the way, such as fuse.
        before: The paper's column with the accuracy before fine-tuning; empty: none.
        after: The paper's column with the accuracy after fine-tuning; empty: none.
        count: The number of trained networks (parents) that the method receives.
        tune: Whether the network is fine-tuned.
        draws: Whether the row is the mean of several random draws, the methods "NAME 0", "NAME 1", ...
    """

    method: str
    before: str = ""
    after: str = ""
    count: int = 2
    tune: bool = True
    draws: bool = False


@dataclass(frozen=True)
class Starts:
    """A table that compares starts. `before` and `after`: the paper's row names; {} is Pair.paper, {row} the start."""

    number: str
    title: str
    pairs: tuple[str, ...]
    rows: tuple[Row, ...]
    before: str = "{}"
    after: str = "{}"


PARENTS = (Row("A", "A", "A, tuned"), Row("B", "B", "B, tuned"), Row("ensemble", "ensemble", tune=False))
FUSED = (
    Row("CLAFusion, add", "fused", "fused, tuned"),
    Row("CLA+OT, ours"),
    Row("fuse"),
)
DEEPENED = Row("B deepened (Net2Net)", "B", "B deepened, tuned")
RESNETS, TEACHERS = ("resnet", "resnet-hundred"), ("vgg", "resnet-half")
ONE = Starts(
    "1", "two ResNets fused, starts compared", RESNETS,
    (*PARENTS, DEEPENED, Row("random A", "", "random, tuned"), Row("naive average"), *FUSED),
)  # fmt: skip
SIX = tuple(
    Row(name, f"M{index + 1}", f"M{index + 1}, tuned", count=2 * (index // 2 + 1))
    for index, name in enumerate(("A", "B", "M3", "M4", "M5", "M6"))
)


def _many(count: int) -> Starts:
    fused = [Row(row.method, row.before, row.after, count) for row in (*FUSED[::2], Row("OTFusion of the A alone"))]
    rows = (*SIX[:count], Row("ensemble", "ensemble", count=count, tune=False), *fused)
    return Starts("2", f"{count} ResNets fused", RESNETS, rows, f"{{}}, {count} nets", f"{{}}, {count} nets")


TWO = (_many(4), _many(6))
HMT = tuple(Row(name, name, name) for name in ("HMT", "HMT + naive average", "HMT + OTFusion", "HMT + CLA + OTFusion"))
THREE = Starts("3", "B transferred into A", RESNETS, (*HMT, Row("HMT + CLA + fuse")), "{} transfer", "{} transfer, tuned")
FOUR = Starts(
    "4 and 18", "teacher A and student B fused", TEACHERS, (*PARENTS, DEEPENED, *FUSED), "{}, mean", "{}, mean"
)  # fmt: skip
TEN = Starts(
    "10", "two MLPs fused", ("mlp",),
    (Row("A", "A"), Row("B", "B"), Row("ensemble", tune=False), Row("B deepened (Net2Net)", "B"), Row("random A"),
     Row("CLAFusion, add", "layers added"), Row("CLAFusion, merge", "merged, sum"), Row("CLA+OT, ours"), Row("fuse")),
    "1-2-5",
)  # fmt: skip
ELEVEN = Starts(
    "11", "maps of the first two layers of B, CLAFusion", ("vgg",),
    tuple(Row(f"{first}-{second}", "fused", "fused, tuned") for first, second in VGG_MAPS), "{row}", "{row}",
)  # fmt: skip
TWELVE = Starts(
    "12", "maps of blocks, CLAFusion", ("resnet",),
    (*(Row(name, "fused", "fused, tuned", draws=name == "random") for name in ("same index", "random")),
     Row("CLA, last not pinned", "fused", "fused, tuned"), Row("CLAFusion, add", "fused", "fused, tuned")),
    "{row}", "{row}",
)  # fmt: skip
NAMES = {"CLAFusion, add": "CLA"}  # Table 12's name


def maker(starts: Starts, *more: Starts) -> Callable[[Study], list[Part]]:
    """Return a function that makes the tables of `starts` and of `more`, and a picture of `starts`."""

    def make(study: Study) -> list[Part]:
        parts: list[Part] = [table for each in (starts, *more) for table in tables(study, each)]
        drawn = {pair: [{name: runs[0]["test"] for name, runs in result.items() if "refused" not in runs[0]}
                        for result in measured(study, starts, pair)]
                 for pair in starts.pairs if pair in size_of(study).pairs}  # fmt: skip
        picture = dots(drawn, ["at once", "fine-tuned"], study.folder / f"table-{starts.number.split()[0]}.png")
        return [*parts, Picture(picture, f"Table {starts.number}: {starts.title}")]

    return make


def measured(study: Study, starts: Starts, pair: str) -> list[dict[str, list[Reached]]]:
    """Return for each seed the results of `runs.reached` by row, a list with one for each random draw."""
    draws = range(size_of(study).draws)
    names = {row: [f"{row.method} {draw}" for draw in draws] if row.draws else [row.method] for row in starts.rows}
    return study.each_seed(lambda seed: {
        row.method: [reached(study, pair, seed, name, row.count, row.tune) for name in names[row]] for row in starts.rows
    })  # fmt: skip


def tables(study: Study, starts: Starts) -> list[Table]:
    """Return a table of starts for each pair of networks in the preset."""
    return [_table(study, starts, pair) for pair in starts.pairs if pair in size_of(study).pairs]


def _table(study: Study, starts: Starts, pair: str) -> Table:
    results, chosen, rows = measured(study, starts, pair), size_of(study).pairs[pair], []
    for row in starts.rows:
        runs = [run for result in results for run in result[row.method] if "refused" not in run]
        size = f"{runs[0]['parameters'] / 1e6:.3f}" if runs else "-"
        rows.append([row.method, size, _stage(runs, 0), _stage(runs, 1), *theirs(starts, row, chosen.paper)])
    note = NOTE.format(epochs=chosen.fine.epochs, rate=chosen.fine.rate, fresh=chosen.recipe.rate, deep=chosen.deep,
                       shallow=chosen.shallow)  # fmt: skip
    head = ["start", "million parameters", "at once", "tuned", "at once (paper)", "tuned (paper)"]
    return study.table(f"Table{'s' * (' ' in starts.number)} {starts.number} ({pair}): {starts.title}", head, rows, note)


def theirs(starts: Starts, row: Row, paper: str) -> list[str]:
    """Return the paper's cells of a row, before and after fine-tuning. `paper` is Pair.paper."""
    table, name = cells("cla_ot", starts.number.split()[-1]), NAMES.get(row.method, row.method)
    return [table.shown(text.format(paper, row=name), column)
            for text, column in ((starts.before, row.before), (starts.after, row.after))]  # fmt: skip


def _stage(runs: Sequence[Reached], stage: int) -> str:
    scores = [run["test"][stage] for run in runs if stage < len(run["test"])]
    return mean_and_spread(scores) if scores else "-"
