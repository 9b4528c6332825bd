"""More rounds for a run that has begun: config.yaml and the ledger get the new number."""

import re
from collections.abc import Sequence

from fedloom.clients.objectives import resolve
from fedloom.clients.training.recipe import Recipe
from fedloom.clients.training.schedules import schedule_section
from fedloom.conf.errors import UserError
from fedloom.conf.formatting import count
from fedloom.conf.schema import Config
from fedloom.server.ledger import Ledger
from fedloom.server.run_folder.folder import RunFolder, read_config
from fedloom.server.strategies import strategy_of

ROUNDS = re.compile(r"^rounds: \d+$", re.MULTILINE)  # the line of config.yaml


def extend(config: Config, folder: RunFolder, ledger: Ledger) -> list[str]:
    """Give the run in `folder` the rounds of `config`, if it has fewer. Return what to tell the user: one line or none.

    The ledger records it first. If a crash prevents the change of config.yaml, the next call makes it.

    Raises UserError if the method divides the rounds among sites, or config.yaml was changed.
    """
    last = ledger.newest("extended")
    if last is not None and folder.config() == last.body["before"]:
        folder.write_config(last.body["config"])
    folder.check(ledger.run().config)
    before = read_config(folder.path).rounds
    if config.rounds <= before:
        return []
    experiment = resolve(config)
    if strategy_of(experiment).schedule(experiment).length(config.rounds) != config.rounds:
        raise UserError(f"rounds: {folder.path} has a method whose sites train one after the other, so the number of rounds "
                        "cannot change after the start; start a new run")  # fmt: skip
    text = folder.config()
    longer = ROUNDS.sub(f"rounds: {config.rounds}", text, count=1)
    ledger.extend(text, longer)
    folder.write_config(longer)
    return [_line(experiment.training, config, before, len(ledger.rounds()) - 1)]


def _line(training: Recipe, config: Config, before: int, done: int) -> str:
    """Return a line that says how the schedule of the rate continues."""
    name, after = schedule_section(config.training)["name"], config.rounds
    rate, changes = training.rate_at(after, done), _rates(training, before, done) != _rates(training, after, done)
    line = f"rounds: {after} (before: {before}). training.schedule={name} continues over {count(after, 'round')}"
    earlier = f"; the first {count(done, 'round')} followed it over {before}" if changes and done else ""
    return f"{line}: round {done + 1} begins with the rate {rate:.4g}{earlier}."


def _rates(training: Recipe, rounds: int, done: int) -> Sequence[float]:
    return [training.rate_at(rounds, round) for round in range(done)]
