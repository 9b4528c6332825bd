"""One method of an experiment in its folder: its rounds, requests between them, and the measurements at the end."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flwr.serverapp import Grid

from fedloom.clients.data.listing import held
from fedloom.clients.networks import Model
from fedloom.clients.objectives import Experiment, resolve
from fedloom.conf import to_json
from fedloom.conf.schema import Config
from fedloom.conf.sites import BEST, Site
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger, Request
from fedloom.server.ledger.blobs import NodeLostError
from fedloom.server.ledger.database import LEDGER, begun, unlock
from fedloom.server.ledger.declared import declared_sums
from fedloom.server.ledger.records import STOPPED
from fedloom.server.rounds.asking import UnorderedError
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.rounds.listener import Listener, StopRun
from fedloom.server.rounds.loop import RoundLoop, recalibration_round
from fedloom.server.rounds.schedules import Restoration
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.rounds.view import Setup
from fedloom.server.run.final_evaluation import check_models
from fedloom.server.run_folder.folder import AGGREGATE, RunFolder
from fedloom.server.run_folder.layout import RETRAINED
from fedloom.server.run_folder.results_schema import LOSS, without_values
from fedloom.server.strategies import slots_of
from fedloom.server.strategies.base import naming
from fedloom.server.unlearning.client_erasure import Erasure
from fedloom.server.unlearning.fulfilment import Unlearning

if TYPE_CHECKING:
    from fedloom.server.run.stopping import Course
ATTEMPTS = 3  # further attempts at a round in which nodes of the cluster are lost


@dataclass
class TrainingRun:
    """A method's run with its folder and ledger: new, or continued after the last committed round.

    Attributes:
        config: The run's configuration.
        folder: The run's folder.
        ledger: The open ledger in this folder.
        evaluator: Measures networks at the server.
        experiment: The resolved configuration.
        state: The server's state after the last committed round.
        course: The values on validation examples so far, if they decide anything.
        loop: The round loop; None before `begin`.
        erasure: In a real federation: asks nodes to delete their stores.
        request_id: The request whose outcome the caller reports.
    """

    config: Config
    folder: RunFolder
    ledger: Ledger
    evaluator: Evaluator
    experiment: Experiment = field(init=False)
    state: ServerState = field(init=False)
    course: "Course | None" = None
    loop: RoundLoop | None = None
    erasure: Erasure | None = None
    request_id: str = ""

    def __post_init__(self) -> None:
        self.folder.check(self.ledger.run().config)
        self.experiment = resolve(self.config)
        self.state = ServerState(Setup(self.experiment, self.sites(), self.folder.path, self.ledger, self.evaluator))
        self.evaluator = self.state.setup.measuring()
        check_models(self.config, self.state.models())
        if self.config.stopping.patience or self.config.evaluation.keep == BEST:
            from fedloom.server.run.stopping import Course  # imported only where it is used

            self.course = Course(self.config)

    def sites(self) -> list[Site]:
        """Return the sites in the run's ledger, including forgotten ones."""
        known = self.ledger.sites()
        return [site for site in self.config.roster if site.name in known]

    def unlearning(self) -> Unlearning:
        """Return the object that fulfils this run's requests."""
        return Unlearning(self.config, self.folder.path, self.ledger, self.state, self.evaluator,
                          self.erasure)  # fmt: skip

    @held()
    def begin(self, channel: ClientChannel, listener: Listener) -> RoundLoop:
        """Create the round loop over this channel. From now on, sites can be asked, for example to measure."""
        self.loop = RoundLoop(self.config, self.ledger.run().run, channel, self.state, self.evaluator, listener)
        return self.loop

    @property
    def measured_by_sites(self) -> bool:
        """Whether some accuracies need the sites: they are measured at the sites, or each site has its own network."""
        return self.config.evaluation.where != "server" or self.state.strategy.personal

    def train(self, channel: ClientChannel, listener: Listener, rounds: int | None = None) -> None:
        """Train all rounds that are not committed yet (`rounds`: up to this one), and process requests between rounds.

        A request may go back to an earlier round, or add rounds.
        """
        loop = self.begin(channel, listener)
        if not channel.simulated:
            self.erasure = Erasure(self.config, self.ledger, channel.grid, listener.message)
        unlearning, wanted = self.unlearning(), loop.last if rounds is None else rounds
        loop.on_masks_removed, loop.written = lambda: unlearning.lifted(listener.message), self._written
        loop.noting = self.folder.note_losses
        loop.last = max(wanted, unlearning.goal())
        unlearning.tidy()
        unlearning.tell_sites()
        if parts := channel.parts(self.ledger.run().run):
            self.state.attach(parts)
            loop.heal(unlearning.last_round() + 1)
        self._resumed(loop)
        self._announce(loop)
        planned = wanted
        while True:
            wanted = planned if rounds is not None else self._end(planned, listener)
            before, announced = unlearning.last_round(), loop.last
            changed = unlearning.take(
                listener.message, lambda request: self.retrained(request, channel, listener), mine=self.request_id
            )
            last, loop.last = unlearning.last_round(), max(wanted, unlearning.goal())
            if last < before:
                self._resumed(loop)
            if last >= loop.last:
                self._bring_home(loop)
                return
            if changed or loop.last != announced:
                self._announce(loop)
            unlearning.tell_sites()
            try:
                if unlearning.recalibrates(last + 1):
                    recalibration_round(loop, last + 1)
                else:
                    one_round(loop, last + 1, unlearning.restoration(last + 1))
            except StopRun:
                from fedloom.server.run.stopping import stopped_by_caller  # imported only where it is used

                self._stop(last + 1, stopped_by_caller(self.experiment), listener)
            if rounds_back := self.config.federation.history_rounds:
                self.ledger.thin(last + 1 - rounds_back)

    def _written(self, record: dict[str, Any]) -> None:
        """Write a committed round's record and, if the configuration says so, the best network so far."""
        self._keep_best(record)
        self.folder.append(record)
        if self.course:
            self.course.see(record)

    def _keep_best(self, record: dict[str, Any]) -> None:
        if self.course and self.config.evaluation.keep == BEST:
            self.course.keep_best(record, self.folder, self.state, self.evaluator)

    def _end(self, planned: int, listener: Listener) -> int:
        """Return the last round: the planned one, or an earlier one after which the run stops."""
        if (stop := self.ledger.stopped()) is None and self.course and 0 < self.course.stops < planned:
            stop = self._stop(self.course.stops, self.course.reason, listener)
        return min(planned, stop["round"]) if stop else planned

    def _stop(self, number: int, reason: str, listener: Listener) -> dict[str, Any]:
        """Record that the run stops after a round."""
        self.ledger.note(STOPPED, stop := {"round": number, "reason": reason})
        listener.message(f"stopped after round {number}: {reason}")
        return stop

    def _bring_home(self, loop: RoundLoop) -> None:
        """Fetch all contributions from nodes at the end of the run, so that the nodes may go."""
        begin, before, brought = time.monotonic(), loop.channel.received or 0, None
        while brought is None:
            try:
                brought = self.state.bring_home()
            except NodeLostError:
                loop.heal(loop.last)
        if brought:
            size, seconds = (loop.channel.received or 0) - before, time.monotonic() - begin
            loop.listener.note(f"{brought} contributions ({size / 1e6:.3g} MB) fetched from nodes in {seconds:.1f} s")

    @held()
    def joined(self, grid: Grid) -> ClientChannel:
        """Wait until all members have joined, except those that a request removes, and return the channel to them. Raises
        UserError naming missing sites.
        """
        members, window = self.state.members(), self.config.federation.window
        if getattr(grid, "simulated", False):
            channel = ClientChannel(grid, members, window)
            channel.begin()
        else:
            channel = ClientChannel(grid, members, window, self.ledger)
            leaving = {site for request in self.unlearning().under_way() for site in request.sites}
            channel.join(self.config.federation.join_timeout, self.config.federation.min_sites, leaving)
        return channel

    def retrained(self, request: Request, channel: ClientChannel, listener: Listener) -> Model:
        """Train a network from the start without a request's sites, in retrained/<request>, and return it."""
        listener.message(f"Request '{request.id}': a network is trained without {', '.join(request.sites)}, for comparison.")
        with self.beside(self.config, f"{RETRAINED}/{request.id}", request.sites) as other:
            other.train(channel, listener, self.unlearning().last_round())
            return other.state.aggregate()

    @contextmanager
    def beside(self, config: Config, name: str, without: Sequence[str] = ()) -> Iterator["TrainingRun"]:
        """Yield a new or resumed TrainingRun in the subfolder `name`, with the same sites except `without`."""
        folder = RunFolder(self.folder.path / name)
        folder.open(dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True)))
        members = [site.name for site in self.state.members() if site.name not in without]
        run = f"{self.ledger.run().run}-{name.replace('/', '-')}"
        with open_ledger(config, folder, run, members) as ledger:
            if self.config.run.resume:
                from fedloom.server.run.more_rounds import extend  # imported only where it is used

                extend(config, folder, ledger)
            yield TrainingRun(config, folder, ledger, self.evaluator)

    def _announce(self, loop: RoundLoop) -> None:
        """Report what is trained now: the sites, and the last round."""
        named = f" ({self.state.display_name})" if self.state.display_name else ""
        run, sites = f"{self.config.run.name}{named}", len(self.state.members())
        loop.listener.started(run, sites, loop.last, str(self.folder.path))

    def _resumed(self, loop: RoundLoop) -> None:
        """Prepare to continue after the last committed round, after a crash or a rollback."""
        self.state.abandon()
        self.ledger.prune()
        self.folder.sweep()
        loop.transport.back = next(
            reversed([each.body["round"] for each in self.ledger.events() if each.kind == "rolled back"]), -1
        )
        last = self.ledger.last_round()
        if last is None or not last.round:
            self.folder.write_metrics([])
        else:
            self.ledger.note("resumed", {"round": last.round})
            self.complete_metrics(loop.measured)
            loop.listener.note(f"continuing after round {last.round}")
        if self.course:
            self.course.restart(self.folder.metrics().values(), self.ledger.extended())

    def leave(self) -> None:
        """Write metrics and shared networks of the committed rounds, when a run ends before it is measured."""
        self.state.abandon()
        self.complete_metrics()
        self.folder.write_standardisation(self.state.features.records())
        models, sites = self.state.models(), {site.name for site in self.state.members()}
        for name in models:
            if name not in sites:
                self.folder.write_network(AGGREGATE if name == self.state.display_name else name, models[name],
                                          self.config, display_name=name)  # fmt: skip

    @held()
    def complete_metrics(self, measured: Callable[[dict[str, Any]], dict[str, Any]] = lambda record: record) -> None:
        """Write a line in metrics.jsonl for each committed round, without values of forgotten sites.

        `measured` adds accuracies to a missing last line.
        """
        known, rows = self.folder.metrics(), [row for row in self.ledger.rounds() if row.round > 0]
        records = {row.round: known.get(row.round) or row.record or {"round": row.round} for row in rows}
        if rows and rows[-1].round not in known:
            last = rows[-1].round
            losses = {LOSS: noted} if (noted := self.folder.noted_losses(last)) else {}
            records[last] = {**measured(records[last]), **losses}
            self._keep_best(records[last])
        gone = {name for name, forgotten in self.ledger.sites().items() if forgotten}
        self.folder.write_metrics(without_values(records.values(), gone))


def one_round(loop: RoundLoop, number: int, restoration: Restoration | None = None) -> dict[str, Any]:
    """Run a round of the strategy (`restoration`: one that restores the aggregate), commit it, and return its record.

    After an overflow, it begins again with the replies in order, so that all engines refuse the same sites.
    Raises TooFewRepliesError if too few sites reply; nothing is committed then.
    """
    attempt, loop.transport.ordered = 0, False
    while True:
        try:
            with naming(f"in round {number}"), loop.round(number, restoration=restoration) as context:
                loop.state.strategy.round(context)
            return context.record
        except NodeLostError as error:  # a node was lost with a contribution that the round needs; nothing is committed
            if attempt == ATTEMPTS:
                raise
            attempt += 1
            loop.listener.message(f"round {number}: {error}; the round begins again")
        except UnorderedError as error:
            loop.transport.ordered = True
            loop.state.ledger.prune()
            loop.listener.message(f"round {number}: {error}; the round begins again, and adds up replies one by one")


def all_rounds(loop: RoundLoop) -> Iterator[dict[str, Any]]:
    """Run all rounds, one after the other, and yield each round's record (a line of metrics.jsonl)."""
    for number in range(1, loop.last + 1):
        yield one_round(loop, number)


def open_ledger(
    config: Config, folder: RunFolder, run: str = "", sites: Sequence[str] = (), lock: int | None = None
) -> Ledger:
    """Return the ledger of a run, an existing or a new one. Raises LedgerError if another server is working on it.

    `lock`: the lock of a new folder (`RunFolder.begin`); this function releases it if it fails.
    """
    if begun(folder.path / LEDGER):
        return Ledger.open(folder.path)
    run = run or hashlib.sha256(f"{to_json(config)}{time.time_ns()}".encode()).hexdigest()[:16]
    names = sites or [site.name for site in config.roster]
    try:
        slots, text = slots_of(resolve(config)), folder.config()
        sums = declared_sums(slots)
    except BaseException:
        if lock is not None:
            unlock(lock)
        raise
    return Ledger.create(folder.path, run, text, config.federation.scale_bits, names, sums, list(slots), lock)
