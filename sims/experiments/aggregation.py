"""Sum aggregation: Tables 1 and 2 and Figure 3, in a federation and in one process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fedloom.clients.data.form import Form
from fedloom.clients.networks import NetworkName
from fedloom.conf import load
from fedloom.sims.experiments.joint_sum import COMMON, OWN, Accuracies, Setting, measured
from fedloom.sims.experiments.papers import cells, source_of
from fedloom.sims.experiments.study import Reproduction, Study, any_override, means, slug
from fedloom.sims.operations.domain_task import Task
from fedloom.sims.report.page import Part
from fedloom.sims.report.results import domains

EXPERIMENT = "mnist_svhn"
PAPERS_NETWORK = ("network.standardise=false", "network.affine=true")
REGULARISED = (*PAPERS_NETWORK, "objective.mode=regularised")
METHODS: dict[str, tuple[str, ...]] = {  # overrides of the experiment
    "independent": (*PAPERS_NETWORK, "objective.mode=independent", "objective.initialisation=own"),
    "fedavg": (*PAPERS_NETWORK, "objective.mode=fedavg"),
    "regularised": REGULARISED,
    "regularised, sites' norms": (*REGULARISED, "strategy.norms=sites"),
    "exact": ("network.standardise=true", "network.affine=false", "objective.mode=exact"),
}
STARTED = {
    f"{others}, {start}": (*REGULARISED, f"objective.others={others}", f"objective.initialisation={initialisation}")
    for others in ("alike", "still")
    for start, initialisation in ((OWN, "own"), (COMMON, "shared"))
}
APART, JOINTLY = "apart", "jointly"
BY_START = {  # rows of --table starts: how the networks are trained, and from which start
    "trained apart, GroupNorm, own starts": (APART, OWN),
    "trained apart, GroupNorm, one start": (APART, COMMON),
    "Eq. 5 jointly, own starts": (JOINTLY, OWN),
    "Eq. 5 jointly, one start": (JOINTLY, COMMON),
    "federated, others alike, own starts": ("alike", OWN),  # plain: ignore
    "federated, others alike, one start": ("alike", COMMON),  # plain: ignore
    "federated, others still, own starts": ("still", OWN),
    "federated, others still, one start": ("still", COMMON),
}

Row = tuple[str, str, tuple[str, ...]]  # the row's name, the method, and the path in its summary
TABLE_1: tuple[Row, ...] = (
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
TABLE_2: tuple[Row, ...] = (
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
    f"(paper): cells of {source_of('sum_aggregation')}. It has one run of a VGG-16 on all images of both data sets. "
    "A question mark: the cell contradicts another cell of its row. The text of the paper says that forgetting "
    "costs up to 2 points."
)


def _tasks(size: int, samples: int) -> tuple[Task, ...]:
    """Return the paper's two data sets, and two more. SVHN is used whole, because the copy here is small."""
    return tuple(Task(name, size, True, 0 if name == "svhn" else samples) for name in ("mnist", "svhn", "usps", "mnist_m"))


def _form(size: int) -> Form:
    return Form.images(1, size, 10)


SIZES = {
    "cpu": (_tasks(16, 800), NetworkName("conv6", {"groups": 4}, _form(16)), {"steps": 2000, "batch": 16, "rate": 0.03}),
    "paper": (_tasks(32, 0), NetworkName("vgg16", {"groups": 32}, _form(32)), {"steps": 230_000, "batch": 64, "rate": 0.01}),
}  # fmt: skip
DOMAINS = ("mnist", "svhn", "union")
JOINT_NOTE = (
    "All networks are trained in one process, each step on a batch of each data set. L_agg has squared Frobenius "
    "norms. forget: the sum without N_i, with the norms of N*. own norms: with those of the remaining network, "
    "which is then N_j itself."
)


def summaries(study: Study, method: str) -> list[Any]:
    """Run a method (a key of METHODS or STARTED) with every seed, and return the runs' summaries."""
    overrides = {**METHODS, **STARTED}[method]
    return study.runs([load(EXPERIMENT, [
        f"preset={study.preset}", f"seed={seed}", *overrides, f"run.root={study.folder}", f"run.name={slug(method)}-{seed}",
        *study.overrides,
    ]) for seed in range(study.seeds)])  # fmt: skip


def jointly(study: Study, sites: int, **options: Any) -> list[Accuracies]:
    """Train on `sites` data sets by Eq. 5, or (strength=0) apart; return each seed's accuracies. `options` of Setting."""
    tasks, network, plan = SIZES[study.preset]
    options = {"network": network, **plan, **options}
    return study.each_seed(lambda seed: measured(study, Setting(tasks[:sites], seed=seed, **options)))


def papers_table(study: Study, number: str, title: str, rows: Sequence[Row]) -> list[Part]:
    """Return Table `number` (1 or 2), measured in a federation, next to the paper's cells."""
    results, paper = {name: summaries(study, name) for name in METHODS}, cells("sum_aggregation", number)
    columns = [*domains(results["exact"][0]), "union"]
    lines = [
        [row, *(text for column in columns for text in (*means(results[method], (*path, column)), paper.shown(row, column)))]
        for row, method, path in rows
    ]
    exact = all(all(summary["checks"].values()) for runs in results.values() for summary in runs)
    checks = "Sum, commutativity and subtraction were " + ("bit-exact in every run." if exact else "NOT exact in some run.")
    head = ["network", *(text for column in columns for text in (column, f"{column} (paper)"))]
    return [study.table(f"Table {number}: {title}", head, lines, f"{PAPER_NOTE} {checks}")]


def starts(study: Study) -> list[Part]:
    """Return a table of the sum's accuracy by training (apart, Eq. 5, federated) and start (own or common)."""

    def row(title: str, results: Sequence[Mapping[str, Any]], *path: str) -> list[str]:
        return [title, *means(results, *((*path, column) for column in DOMAINS))]

    rows = []
    for title, (way, start) in BY_START.items():
        if way in (APART, JOINTLY):
            strength = {"strength": 0.0} if way == APART else {}
            rows.append(row(title, jointly(study, 2, start=start, **strength), "sum"))
        else:
            rows.append(row(title, summaries(study, f"{way}, {start}"), "accuracy", "sum"))
    network = SIZES[study.preset][1]
    batch = replace(network, options={**network.options, "norm": "batch"})
    baseline = jointly(study, 2, start=OWN, strength=0.0, network=batch)
    rows.append(row("trained apart, BatchNorm, own starts (the paper's baseline)", baseline, "sum"))
    paper = cells("sum_aggregation", "1")
    rows += [[f"the paper: {name}", *(paper.shown(name, column) for column in DOMAINS)]
             for name in ("baseline N1+N2", "proposed N1+N2")]  # fmt: skip
    return [study.table("What the sum N_1 + N_2 knows, by start and method", ["", *DOMAINS], rows, JOINT_NOTE)]


JOINT_ROWS = {  # by number of data sets
    2: ("N1", "N2", "N*", "sum", "forget N1", "forget N1, own norms", "forget N2", "forget N2, own norms"),
    4: ("N1", "N2", "N3", "N4", "N*", "sum", "forget N1", "forget N2", "forget N3", "forget N4"),
}
LENGTHS = {"an eighth of the steps": 8, "a quarter": 4, "half": 2, "all": 1}


def joint(study: Study) -> list[Part]:
    """Return the accuracies of networks trained by Eq. 5 in one process, on two and on four data sets."""
    parts: list[Part] = []
    for sites in (2, 4):
        results = jointly(study, sites)
        columns = [task.domain for task in SIZES[study.preset][0][:sites]] + ["union"]
        rows = [[name, *means(results, *((name, column) for column in columns))] for name in JOINT_ROWS[sites]]
        title = f"Eq. 5 jointly, {sites} data sets, own starts"
        parts.append(study.table(title, ["network", *columns], rows, JOINT_NOTE))
    return parts


def epochs(study: Study) -> list[Part]:
    """Return Figure 3: the accuracy of N* and of the sum after trainings of several lengths."""
    most = SIZES[study.preset][2]["steps"]
    rows = [[name, *means(jointly(study, 2, steps=most // share), ("N*", "union"), ("sum", "union"))]
            for name, share in LENGTHS.items()]  # fmt: skip
    note = f"All: {most:,} steps. Accuracy on all test examples. Each length is a separate training, whose rate falls to 0."
    return [study.table("Figure 3: steps, Eq. 5 jointly", ["steps", "N*", "sum"], rows, note)]


TABLES: dict[str, Callable[[Study], list[Part]]] = {
    "1": partial(papers_table, number="1", title="what each network knows", rows=TABLE_1),
    "2": partial(papers_table, number="2", title="commutativity and forgetting", rows=TABLE_2),
    "starts": starts,
    "joint": joint,
    "epochs": epochs,
}
reproduce = Reproduction(
    "Sum aggregation", "runs/reproduce-aggregation-{preset}", SIZES, TABLES, "sum_aggregation",
    check=any_override, one_thread=False,
)  # fmt: skip
