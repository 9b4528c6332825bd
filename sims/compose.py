"""The command `fedloom compose`: a network of some of a run's sites, made from what they contributed, without training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from clients.data import num_classes
from clients.networks import NetworkName, save_network
from clients.states import read_state
from conf.errors import UserError, unknown
from conf.schema import Config
from fusion.arithmetic import GRADIENTS, WEIGHTS, Alpha, check_shapes
from fusion.exact import ExactSumError, State, digest
from server.evaluate import Evaluator
from server.ledger import Ledger, LedgerError
from server.method import Method
from server.runfolder import RunFolder, read_config
from server.strategies import Aggregation
from server.strategies.arithmetic import Arithmetic
from sims.tables import Table, percent

T = TypeVar("T")
TRIES = 5  # to read a run that a server is at work on


@dataclass(frozen=True)
class Order:
    """Which sites, with which coefficients (empty: the run's own), combined how (empty: as the run does), in what network.

    `start`: another network that the gradients are assigned to (None: theta_0), which needs `force`.
    """

    sites: Sequence[str]
    coefficients: Sequence[float] = ()
    how: str = ""
    start: Path | None = None
    force: bool = False
    measure: bool = True


def compose(run: Path, order: Order, out: Path) -> list[Table]:
    """Write the network to `out`; what it is made of, and what it knows. Raises UserError for what cannot be done."""
    _check(order, run, out)
    config = read_config(run)
    evaluator = Evaluator(config)
    with Ledger.open(run, server=False) as ledger:
        if ledger.last_round() is None:
            raise UserError(f"{run}: nothing is committed yet; wait for the first round")
        state, parts = steady(
            ledger, lambda: _composed(Method(config, RunFolder(run), ledger, evaluator).aggregation, order)
        )
    state = evaluator.settled(state)
    evaluator.network.load_state_dict(state)
    save_network(out, evaluator.network, name_of(config))
    tables = [Table("Made of", ["site", "coefficient"], parts)]
    if order.measure:
        rows = [[domain, percent(share)] for domain, share in evaluator.accuracy(state, "test").items()]
        tables.append(Table("Test accuracy", ["domain", "accuracy"], rows))
    return tables


def name_of(config: Config) -> NetworkName:
    """What builds a configuration's network again."""
    options = {key: item for key, item in config.network.items() if key != "name"}
    channels = 1 if config.data.grey else 3
    return NetworkName(config.network["name"], options, channels, config.data.size, num_classes(config))


def steady(ledger: Ledger, make: Callable[[], T]) -> T:
    """What `make` makes of one and the same round: again, if a server has committed another one meanwhile."""
    for _ in range(TRIES):
        before = ledger.last_round()
        try:
            found = make()
        except LedgerError:  # it has just replaced a blob
            if ledger.last_round() == before:
                raise
            continue
        if ledger.last_round() == before:
            return found
    raise UserError(f"{ledger.folder}: a server is at work and commits round after round; compose again when it is done")


def _check(order: Order, run: Path, out: Path) -> None:
    if not out.parent.is_dir() or out.is_dir():
        raise UserError(f"--out: got {out}, takes the path of a file in a folder that is there")
    if run.resolve() in out.resolve().parents:
        raise UserError(f"--out: got {out}, which is among the run's own files; take another folder")
    if order.how and order.how not in (GRADIENTS, WEIGHTS):
        raise unknown("--how", order.how, (GRADIENTS, WEIGHTS))
    if order.coefficients and len(order.coefficients) != len(order.sites):
        raise UserError(f"--coefficients: {len(order.coefficients)} for {len(order.sites)} sites; give one for each")


def _composed(aggregation: Aggregation, order: Order) -> tuple[State, list[list[str]]]:
    """The network, and rows of sites and coefficients."""
    if isinstance(aggregation, Arithmetic):
        aggregation.check_names(order.sites)
        given = dict(zip(order.sites, order.coefficients, strict=True)) if order.coefficients else {}
        whole = sorted(order.sites) == sorted(site.name for site in aggregation.members())
        alphas: Mapping[str, Alpha] = given or (aggregation.coefficients() if whole else aggregation.chosen(order.sites))
        rows = [[name, f"{alpha:g}" if isinstance(alpha, float) else "by layer"] for name, alpha in alphas.items()]
        try:
            return aggregation.compose(alphas, order.how, _start(aggregation, order)), rows
        except ExactSumError as error:
            raise UserError(f"{order.start}: {error}") from None
    if order.coefficients or order.how or order.start:
        raise UserError("--coefficients, --how and --start are for runs of the strategy arithmetic; leave them out")
    state = aggregation.only(order.sites)
    if state is None:
        raise UserError("this run's method keeps no contributions of its sites: nothing can be composed from it")
    return state, [[name, "1"] for name in order.sites]


def _start(aggregation: Arithmetic, order: Order) -> State | None:
    """The other network to assign to. UserError for another shape, and for one that is not theta_0 unless forced."""
    if order.start is None:
        return None
    given = read_state(order.start)
    check_shapes(aggregation.like, given, str(order.start))
    given = {name: tensor.to(aggregation.like[name].dtype) for name, tensor in given.items()}
    here, theirs = digest(given), digest(aggregation.like)
    if here != theirs and not order.force:
        digests = f"digest {here[:12]}, theirs is {theirs[:12]}"
        raise UserError(f"{order.start}: is not the network that the sites started from ({digests}); --force assigns to it")
    return given
