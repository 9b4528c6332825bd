"""Carry out planned runs: those that are there are kept or go on, those missing are started, none stops another."""

import dataclasses
from collections.abc import Sequence

from conf.errors import UserError
from sims.simulate import absolute_paths, refuse, simulate
from sims.sweeps.display import Display, display_for
from sims.sweeps.lanes import Lanes
from sims.sweeps.outcome import KEPT, Outcome, attempt, failed, finished
from sims.sweeps.plan import Planned, placed


def ready(planned: Sequence[Planned], *, overwrite: bool = False) -> list[Planned]:
    """The same, by what is there already. UserError, before anything starts, for whatever of them cannot work."""
    there = [placed(dataclasses.replace(one, config=absolute_paths(one.config)), overwrite) for one in planned]
    for one in there:
        if not one.done:
            _refuse(one)
    return there


def _refuse(one: Planned) -> None:
    try:
        refuse(one.config)
    except UserError as error:
        raise UserError(f"{error} (the run {one.name})") from None


def carry_out(
    planned: Sequence[Planned], parallel: int = 0, *, quiet: bool = False, json_output: bool = False
) -> list[Outcome]:
    """What became of each run, in their order. `parallel`: processes that run one each at a time; 0: in this process.

    A KeyboardInterrupt ends all that is under way, within seconds, and goes on; so does the same sweep later.
    """
    missing = [one for one in planned if not one.done]
    done = {one.name: finished(one, KEPT) for one in planned if one.done}
    with display_for(quiet, len(planned), len(done), json_output) as display:
        run = Lanes(parallel, display).run if parallel else lambda tasks: _here(tasks, display)
        found = run(missing) if missing else []
    done |= {one.name: outcome for one, outcome in zip(missing, found, strict=True)}
    return [done[one.name] for one in planned]


def _here(tasks: Sequence[Planned], display: Display) -> list[Outcome]:
    """One after the other, in this process."""
    outcomes = []
    for task in tasks:
        listener = display.begin(task.name)
        reason = attempt(lambda task=task, listener=listener: simulate(task.config, listener=listener))
        outcome = failed(task, reason) if reason else finished(task)
        display.end(task.name, outcome)
        outcomes.append(outcome)
    return outcomes
