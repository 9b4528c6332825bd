"""Make a network of some sites of a run from their contributions, without training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fedloom.clients.data.splits import SplitRule
from fedloom.clients.networks import Architecture, Model, NetworkName, save_network
from fedloom.clients.networks.named import read_split
from fedloom.clients.storage.states import read_state
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.schema import Config
from fedloom.fusion.arithmetic import GRADIENTS, WEIGHTS, Alpha, check_shapes
from fedloom.fusion.exact import ExactSumError
from fedloom.fusion.state import State, digest
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.run_folder.folder import RunFolder, read_config
from fedloom.server.strategies.arithmetic import ArithmeticStrategy, start_of
from fedloom.sims.operations.network_files import check_out
from fedloom.sims.report.tables import Table

T = TypeVar("T")


@dataclass(frozen=True)
class CompositionOrder:
    """The network to compose from sites of a run.

    Attributes:
        sites: The sites whose changes are added.
        coefficients: One for each site; empty: those of the run.
        how: "gradients" or "weights"; "": as in the run.
        start: A file of the network to which the sum is added; None: theta_0.
        force: Whether `start` may be another network than theta_0.
        measure: Whether to measure the accuracy.
    """

    sites: Sequence[str]
    coefficients: Sequence[float] = ()
    how: str = ""
    start: Path | None = None
    force: bool = False
    measure: bool = True


def compose(run: Path, order: CompositionOrder, out: Path) -> list[Table]:
    """Write the network to `out`, and return tables of its sites and its accuracy. Raises UserError if it cannot be made."""
    _check(order, out)
    config = read_config(run)
    evaluator, (model, parts) = steadily(run, config, lambda state: _composed(state, order))
    model = evaluator.with_statistics(model)
    save_network(out, evaluator.loaded(model), name_of(model.architecture), SplitRule.of(config))
    tables = [Table("Made of", ["site", "coefficient"], parts)]
    if order.measure:
        metric, values = evaluator.metrics.first, next(iter(evaluator.table(model, "test").values()), {})
        rows = [[domain, metric.text(value)] for domain, value in values.items()]
        tables.append(Table(f"Test {metric.title}", ["domain", metric.title], rows, _start_note(order.start, config.seed)))
    return tables


def steadily(run: Path, config: Config, read: Callable[[ServerState], T]) -> tuple[Evaluator, T]:
    """Return an evaluator, and what `read` returns of a run's last round, also while a server commits others.

    Raises UserError before the first round.
    """

    def reading() -> tuple[Evaluator, T]:
        method = TrainingRun(config, RunFolder(run), ledger, Evaluator(config))
        return method.evaluator, read(method.state)

    with Ledger.open(run, server=False) as ledger:
        if ledger.last_round() is None:
            raise UserError(f"{run}: the run has no committed round yet; wait for the first one")
        return ledger.steady(reading)


def name_of(architecture: Architecture) -> NetworkName:
    """Return the name, with options and form, that builds a network of this architecture."""
    options = architecture.options
    name = options.pop("name")
    return NetworkName(name, options, architecture.form)


def _start_note(start: Path | None, seed: int) -> str:
    """Return a note if the network of `--start` was trained with another seed than the run's."""
    record = read_split(start) if start else None
    if record is None or record.seed == seed:
        return ""
    return (f"{start} was trained with seed {record.seed}, the run with {seed}: it may have seen these test examples. "
            "Start from a network of this run")  # fmt: skip


def _check(order: CompositionOrder, out: Path) -> None:
    check_out(out)
    if order.how and order.how not in (GRADIENTS, WEIGHTS):
        raise unknown("--how", order.how, (GRADIENTS, WEIGHTS))
    if order.coefficients and len(order.coefficients) != len(order.sites):
        raise UserError(f"--coefficients: {len(order.coefficients)} for {len(order.sites)} sites; name one for each site")


def _composed(aggregation: ServerState, order: CompositionOrder) -> tuple[Model, list[list[str]]]:
    """Return the network, and rows of sites and coefficients."""
    strategy, view = aggregation.strategy, aggregation.view().subset(order.sites)
    if isinstance(strategy, ArithmeticStrategy):
        stated = dict(zip(order.sites, order.coefficients, strict=True)) if order.coefficients else {}
        alphas: Mapping[str, Alpha] = stated or (strategy.alphas(view) if view.whole else strategy.chosen(view))
        rows = [[name, f"{alpha:g}" if isinstance(alpha, float) else "by layer"] for name, alpha in alphas.items()]
        try:
            state = strategy.compose(view, alphas, order.how, _start(aggregation, order))
        except ExactSumError as error:
            raise UserError(f"{order.start}: {error}") from None
        return Model(view.architecture(), state), rows
    if order.coefficients or order.how or order.start:
        raise UserError("--coefficients, --how and --start are for runs of the strategy arithmetic; leave them out")
    if not aggregation.slots.sums or not aggregation.display_name:
        raise UserError(
            "this run's method stores no contributions of sites, or strategy.forgettable is false; "
            "nothing can be composed from it"
        )
    if aggregation.config.federation.secure_aggregation and {site.name for site in aggregation.members()} - {*order.sites}:
        raise UserError("--sites: secure aggregation hides the contributions of single sites; name all sites of the run")
    return aggregation.aggregate(view), [[name, "1"] for name in order.sites]


def _start(aggregation: ServerState, order: CompositionOrder) -> State | None:
    """Return the network of `--start`. Raises UserError if its shapes differ, or if it is not theta_0 without --force."""
    if order.start is None:
        return None
    start, theta = read_state(order.start), start_of(aggregation.view())
    check_shapes(theta, start, str(order.start))
    start = {name: tensor.to(theta[name].dtype) for name, tensor in start.items()}
    ours, theirs = digest(start), digest(theta)
    if ours != theirs and not order.force:
        digests = f"digest {ours[:12]}, theirs is {theirs[:12]}"
        raise UserError(f"{order.start}: is not the network that the sites started from ({digests}); add --force to use it")
    return start
