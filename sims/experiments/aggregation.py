"""sum aggregation, Tables 1 and 2: what N_1, N_2, N* and N_1 + N_2 know, commutativity, and forgetting by subtraction."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.clients.networks import NetworkName
from fedloom.conf import load
from fedloom.conf.errors import unknown
from fedloom.conf.formatting import count
from fedloom.conf.schema import Config
from fedloom.sims.experiments.joint_sum import COMMON, OWN, Accuracies, Setting, measured
from fedloom.sims.experiments.papers import cells, source_of
from fedloom.sims.experiments.table_files import chosen, write
from fedloom.sims.operations.domain_task import Task
from fedloom.sims.operations.simulate import simulate_once
from fedloom.sims.progress.listeners import listener_for
from fedloom.sims.report.page import Part
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table, domains

EXPERIMENT = "mnist_svhn"


@dataclass(frozen=True)
class Method:
    """One way to train, as overrides of the experiment."""

    title: str
    overrides: tuple[str, ...]


PAPERS_NETWORK = ("network.standardise=false", "network.affine=true")
METHODS = {
    "independent": Method(
        "baseline: trained apart", (*PAPERS_NETWORK, "objective.mode=independent", "objective.initialisation=own")
    ),
    "fedavg": Method("baseline: one network for both (FedAvg)", (*PAPERS_NETWORK, "objective.mode=fedavg")),
    "regularised": Method("proposed: the paper's regulariser", (*PAPERS_NETWORK, "objective.mode=regularised")),
    "regularised, sites' norms": Method(
        "proposed, the sum with the sites' own norms",
        (*PAPERS_NETWORK, "objective.mode=regularised", "strategy.norms=sites"),
    ),
    "exact": Method(
        "ours: the mean is N*, weights standardised",
        ("network.standardise=true", "network.affine=false", "objective.mode=exact"),
    ),
}

ALL = METHODS | {
    f"{others}, {start}": Method(
        "regularised", (*PAPERS_NETWORK, "objective.mode=regularised", f"objective.others={others}",
                        f"objective.initialisation={start.replace(COMMON, 'shared')}"),
    )
    for others in ("alike", "still") for start in (OWN, COMMON)
}  # fmt: skip

Row = tuple[str, str, tuple[str, ...]]
# (key of the row, its name, the method, where the summary holds it)
TABLE_1 = (
    ("baseline N1", "independent", ("accuracy", "site-0000")),
    ("baseline N2", "independent", ("accuracy", "site-0001")),
    ("baseline N*", "fedavg", ("accuracy", "fedavg")),
    ("baseline N1+N2", "independent", ("accuracy", "sum")),
    ("proposed N1", "regularised", ("accuracy", "site-0000")),
    ("proposed N2", "regularised", ("accuracy", "site-0001")),
    ("proposed N*", "regularised", ("accuracy", "star")),
    ("proposed N1+N2", "regularised", ("accuracy", "sum")),
    ("ours N1", "exact", ("accuracy", "site-0000")),
    ("ours N2", "exact", ("accuracy", "site-0001")),
    ("ours N* = N1+N2", "exact", ("accuracy", "sum")),
)
TABLE_2 = (
    ("proposed N1+N2", "regularised", ("accuracy", "sum")),
    ("proposed N2+N1", "regularised", ("reversed",)),
    ("proposed forget N1", "regularised", ("forgotten", "site-0000")),
    ("proposed forget N2", "regularised", ("forgotten", "site-0001")),
    ("sites' norms N1+N2", "regularised, sites' norms", ("accuracy", "sum")),
    ("sites' norms forget N1", "regularised, sites' norms", ("forgotten", "site-0000")),
    ("sites' norms forget N2", "regularised, sites' norms", ("forgotten", "site-0001")),
    ("ours N1+N2", "exact", ("accuracy", "sum")),
    ("ours N2+N1", "exact", ("reversed",)),
    ("ours forget N1", "exact", ("forgotten", "site-0000")),
    ("ours forget N2", "exact", ("forgotten", "site-0001")),
)
PAPER_NOTE = (
    f"(paper): cells of {source_of('sum_aggregation')}: all images of both data sets, VGG-16, one run; a question mark: it "
    "contradicts another cell of its row. The paper states in words that forgetting costs up to 2 points."
)


def _tasks(size: int, samples: int) -> tuple[Task, ...]:
    """The paper's two data sets, and two more. SVHN is as small as it is here."""
    return tuple(Task(name, size, True, 0 if name == "svhn" else samples) for name in ("mnist", "svhn", "usps", "mnist_m"))


SIZES = {
    "cpu": (_tasks(16, 800), NetworkName("conv6", {"groups": 4}, 1, 16, 10), {"steps": 2000, "batch": 16, "rate": 0.03}),
    "paper": (_tasks(32, 0), NetworkName("vgg16", {"groups": 32}, 1, 32, 10), {"steps": 230_000, "batch": 64, "rate": 0.01}),
}  # fmt: skip
STARTS = {OWN: "own starts", COMMON: "one start"}
JOINT_NOTE = (
    "All networks in one process, a step on a batch of each data set; L_agg has squared Frobenius norms. Forgotten: the "
    "sum without N_i, with N*'s norms; own norms: with those of the network that is left, which is then N_j itself."
)


@dataclass(frozen=True)
class Asked:
    """What is to be measured."""

    preset: str
    seeds: int
    overrides: Sequence[str]
    quiet: bool

    @property
    def root(self) -> Path:
        """Where runs and tables go."""
        return Path(_config(self.preset, "exact", 0, self.overrides).run.root)

    def summaries(self, method: str) -> list[Any]:
        """A method's runs, one for each seed."""
        return [
            simulate_once(_config(self.preset, method, seed, self.overrides), listener=listener_for(self.quiet))
            for seed in range(self.seeds)
        ]

    def jointly(self, sites: int, **options: Any) -> list[Accuracies]:
        """Accuracies of networks that are trained as Eq. 5 says (or apart), of every seed."""
        tasks, network, plan = SIZES[self.preset]
        network = options.pop("network", network)
        settings = (Setting(tasks[:sites], network, seed=seed, **{**plan, **options}) for seed in range(self.seeds))
        return [measured(setting, self.root / "joint") for setting in settings]


def reproduce(preset: str, seeds: int, overrides: Sequence[str], *, quiet: bool) -> Path:
    """Measure the tables with every seed (what is on disk is taken as it is) and write them as Markdown and HTML.

    `overrides`: tables=1,starts chooses some of TABLES; others are for every federated run. Returns the folder, with
    tables.md and report.html. Raises UserError for bad overrides.
    """
    if preset not in SIZES:
        raise unknown("preset", preset, SIZES)
    tables, rest = chosen("tables", overrides, TABLES)
    asked, parts = Asked(preset, seeds, rest, quiet), list[Part]()
    for name in tables or TABLES:
        parts += TABLES[name](asked)
        write(asked.root, "Sum aggregation", source_of("sum_aggregation"), parts)  # what there is so far
    return asked.root


def papers_tables(asked: Asked, number: str, rows: Sequence[Row]) -> list[Part]:
    """Table 1 or 2 in a federation, ours beside the paper's cells."""
    summaries = {name: asked.summaries(name) for name in METHODS}
    paper, titles = cells("sum_aggregation", number), {"1": "what each network knows", "2": "commutativity and forgetting"}
    columns = [*domains(summaries["exact"][0]), "union"]
    head = ["network"] + [text for column in columns for text in (column, f"{column} (paper)")]
    lines = []
    for row, method, path in rows:
        line: list[str] = [row]
        for column in columns:
            scores = [_at(summary, path)[column] for summary in summaries[method]]
            line += [mean_and_spread(scores), paper.shown(row, column)]
        lines.append(line)
    exact = all(all(summary["checks"].values()) for runs in summaries.values() for summary in runs)
    checks = "Sum, commutativity and subtraction were " + ("bit-exact in every run." if exact else "NOT exact in some run.")
    return [Table(f"Table {number}: {titles[number]}, {count(asked.seeds, 'seed')}", head, lines, f"{PAPER_NOTE} {checks}")]


def starts(asked: Asked) -> list[Part]:
    """Trained apart and regularised, from own starts and from one, in a federation and jointly."""
    rows = []
    for start, title in STARTS.items():
        apart = [accuracies["sum"] for accuracies in asked.jointly(2, start=start, strength=0.0)]
        joint = [accuracies["sum"] for accuracies in asked.jointly(2, start=start)]
        rows += [_row(f"trained apart, GroupNorm, {title}", apart), _row(f"Eq. 5 jointly, {title}", joint)]
        for others in ("alike", "still"):
            runs = [summary["accuracy"]["sum"] for summary in asked.summaries(f"{others}, {start}")]
            rows.append(_row(f"federated, others {others}, {title}", runs))
    batch = replace(SIZES[asked.preset][1], options={**SIZES[asked.preset][1].options, "norm": "batch"})
    baseline = asked.jointly(2, start=OWN, strength=0.0, network=batch)
    rows.append(
        _row("trained apart, BatchNorm, own starts (the paper's baseline)", [accuracies["sum"] for accuracies in baseline])
    )
    paper = cells("sum_aggregation", "1")
    rows += [[f"the paper: {name}", *(paper.shown(name, column) for column in ("mnist", "svhn", "union"))]
             for name in ("baseline N1+N2", "proposed N1+N2")]  # fmt: skip
    title = f"What the sum N_1 + N_2 knows, by start and method, {count(asked.seeds, 'seed')}"
    return [Table(title, ["", "mnist", "svhn", "union"], rows, JOINT_NOTE)]


def joint(asked: Asked) -> list[Part]:
    """Eq. 5 as it stands, with two data sets (Tables 1 and 2) and with four."""
    parts: list[Part] = []
    for sites in (2, 4):
        results = asked.jointly(sites)
        columns = [task.domain for task in SIZES[asked.preset][0][:sites]] + ["union"]
        rows = [
            [name, *(mean_and_spread([result[name][column] for result in results]) for column in columns)]
            for name in results[0]
        ]
        title = f"Eq. 5 jointly, {sites} data sets, own starts, {count(asked.seeds, 'seed')}"
        parts.append(Table(title, ["network", *columns], rows, JOINT_NOTE))
    return parts


def epochs(asked: Asked) -> list[Part]:
    """Figure 3: more epochs help the sum."""
    most = SIZES[asked.preset][2]["steps"]
    rows = []
    for share in (8, 4, 2, 1):
        results = asked.jointly(2, steps=most // share)
        rows.append(
            [
                f"{most // share:,}",
                *(mean_and_spread([result[name]["union"] for result in results]) for name in ("N*", "sum")),
            ]
        )
    note = "Accuracy on all test images. Each length is a training of its own, whose rate falls to 0."
    return [Table(f"Figure 3: steps, Eq. 5 jointly, {count(asked.seeds, 'seed')}", ["steps", "N*", "sum"], rows, note)]


TABLES: dict[str, Callable[[Asked], list[Part]]] = {
    "1": partial(papers_tables, number="1", rows=TABLE_1),
    "2": partial(papers_tables, number="2", rows=TABLE_2),
    "starts": starts,
    "joint": joint,
    "epochs": epochs,
}


def _row(title: str, results: Sequence[Mapping[str, float]]) -> list[str]:
    return [title, *(mean_and_spread([result[column] for result in results]) for column in ("mnist", "svhn", "union"))]


def _config(preset: str, method: str, seed: int, overrides: Sequence[str]) -> Config:
    run = [f"run.root=runs/reproduce-aggregation-{preset}", f"run.name={_folder(method)}-{seed}"]
    return load(EXPERIMENT, [f"preset={preset}", f"seed={seed}", *ALL[method].overrides, *run, *overrides])


def _folder(method: str) -> str:
    return method.replace("'", "").replace(", ", "-").replace(" ", "-")


def _at(summary: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, float]:
    inside: Any = summary
    for key in path:
        inside = inside[key]
    return inside
