"""What validation examples decide in a run: when it stops early, and which network is the best."""

from collections.abc import Iterable, Mapping
from typing import Any

from fedloom.clients.evaluation.metrics import metrics_of
from fedloom.clients.objectives import Experiment
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.formatting import count
from fedloom.conf.metrics import Facts
from fedloom.conf.schema import Config
from fedloom.conf.sites import BEST
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.run_folder.scores import value_in
from fedloom.server.strategies import strategy_of


class Course:
    """A run's values on validation examples so far, and whether they stop the run."""

    def __init__(self, config: Config) -> None:
        self.stopping, self.metric = config.stopping, _metric(config)
        self.restart(())

    def restart(self, records: Iterable[Mapping[str, Any]], since: int = 0) -> None:
        """Begin again, with these records of earlier rounds. Patience counts from round `since` at the earliest."""
        self.round, self.stops, self._since, self._best, self._value = 0, 0, since, 0, None
        for record in records:
            self.see(record)

    def see(self, record: Mapping[str, Any]) -> None:
        """Take in a round's record."""
        if self.stops or (value := value_in(record, self.metric.name)) is None:
            return
        worth, self.round = self.metric.worth(value), record["round"]
        if self._value is None or worth > self._value + self.stopping.min_change:
            self._value, self._best = worth, self.round
        elif self.stopping.patience and self.round - max(self._best, self._since) >= self.stopping.patience:
            self.stops = self.round

    def keep_best(self, record: Mapping[str, Any], folder: RunFolder, state: ServerState, evaluator: Evaluator) -> None:
        """Write the aggregate to states/best.safetensors, if it is better than the network there."""
        value, before = value_in(record, self.metric.name), folder.best()
        if value is None or (before and self.metric.worth(value) <= self.metric.worth(before["value"])):
            return
        facts = {"round": str(record["round"]), "metric": self.metric.name, "value": repr(value)}
        folder.write_network(BEST, evaluator.with_statistics(state.aggregate()), evaluator.config, **facts)

    @property
    def reason(self) -> str:
        """Why the run stops after round `stops`."""
        best = self.metric.text(self.metric.worth(self._value or 0.0))
        more = f", and the run had more rounds from round {self._since} on" if self._since > self._best else ""
        return (f"the best validation {self.metric.title} is that of round {self._best} ({best}), "
                f"{count(self.stops - self._best, 'round')} ago{more} (stopping.patience)")  # fmt: skip


def check_stopping(experiment: Experiment) -> None:
    """Raise UserError for options of `stopping` and evaluation.keep that have no effect or cannot work."""
    config, stopping = experiment.config, experiment.config.stopping
    best = config.evaluation.keep == BEST
    _metric(config)
    if (stopping.metric and not (stopping.patience or best)) or (stopping.min_change and not stopping.patience):
        raise UserError("stopping: has no effect without stopping.patience; set the rounds to wait for a better value")
    if not (stopping.patience or best):
        return
    key = "stopping.patience" if stopping.patience else f"evaluation.keep={BEST}"
    if not config.data.validation:
        raise UserError(f"{key}: needs validation examples; set data.validation above 0")
    if stopping.patience and strategy_of(experiment).schedule(experiment).length(1) != 1:
        raise UserError("stopping.patience: sites of this method train one after the other, so stopping early would leave "
                        "sites out; set it to 0")  # fmt: skip
    if stopping.patience and leaves_to_the_last(experiment):
        raise UserError("stopping.patience: with this strategy.every, the last round does what earlier rounds do not, and "
                        "stopping early would leave it out; set strategy.every=1")  # fmt: skip


def stopped_by_caller(experiment: Experiment) -> str:
    """Return why a run stops whose caller asked for it."""
    left = "; what strategy.every leaves to the last round is not done" if leaves_to_the_last(experiment) else ""
    return f"on_round returned 'stop'{left}"


def leaves_to_the_last(experiment: Experiment) -> bool:
    """Return whether the last round measures or fuses what earlier rounds do not."""
    return getattr(strategy_of(experiment), "every", 1) != 1


def _metric(config: Config) -> Facts:
    """Return the metric that decides. Raises UserError if stopping.metric is not a number in evaluation.metrics."""
    known = {each.facts.name: each.facts for each in metrics_of(config).chosen if each.facts.number}
    name = config.stopping.metric or next(iter(known))
    if name not in known:
        raise UserError(
            f"{unknown('metric in stopping.metric', name, known)}; evaluation.metrics lists those that are measured"
        )
    return known[name]
