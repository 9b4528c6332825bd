"""Run and resume experiments from Python, for example in a notebook."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.clients.training.torch_setup import as_usual
from fedloom.conf import load
from fedloom.conf.errors import UserError, for_python
from fedloom.conf.loading import is_shipped, load_text, to_yaml
from fedloom.conf.plain_values import plain_here, plain_value
from fedloom.conf.schema import Config
from fedloom.conf.typed import checked
from fedloom.conf.values import shortened, words_in
from fedloom.conf.yaml_text import write_yaml
from fedloom.server.strategies.defaults import configured, with_default_objective
from fedloom.sims.operations import simulate as simulations
from fedloom.sims.progress.callbacks import Callbacks, OnReply, OnRound
from fedloom.sims.progress.listeners import listener_for
from fedloom.sims.result import Result, path_of

OnFinished = Callable[["Result"], object]


@for_python
def run(
    experiment: str | os.PathLike[str] | Mapping[str, Any] | Config,
    *overrides: str,
    overwrite: bool = False,
    progress: bool = False,
    on_round: OnRound | None = None,
    on_reply: OnReply | None = None,
    on_finished: OnFinished | None = None,
) -> "Result":
    """Run an experiment in the folder run.root/run.name, and return its result when it is finished.

    Callbacks are called in this thread. An exception from a callback ends the run and is raised here. After it, or after a
    KeyboardInterrupt, `resume` continues the run.

    Args:
        experiment: The name of a shipped experiment, the path of a YAML file, a dictionary with the same keys, or what
            `load` returns. Classes and functions of a module can stand for their names in a dictionary; with
            engine.name=inline, also those of a script or notebook.
        overrides: Changed keys, `"key=value"`, as on the command line.
        overwrite: Replace an existing run of the same name.
        progress: Show the progress.
        on_round: Called after each committed round with its record, as in `Result.metrics`: `loss` is the training loss by
            site, `train_loss` their mean. One more key is `part`: empty, or the folder of a baseline. If it returns "stop",
            this part ends here, as a finished one.
        on_reply: Called with (site, ok, reason) for each reply of a site, and for each missing one.
        on_finished: Called with the result when the report is written.

    Raises:
        UserError: Before anything starts, if the experiment cannot work.
    """
    config = config_of(experiment, [*overrides, *(["run.overwrite=true"] if overwrite else [])])
    with as_usual():
        callbacks = Callbacks(on_round, on_reply)
        simulations.simulate(config, listener=listener_for(quiet=not progress), listeners=[callbacks])
    return _finished(Path(config.run.root) / config.run.name, on_finished)


def config_of(experiment: str | os.PathLike[str] | Mapping[str, Any] | Config, overrides: Sequence[str]) -> Config:
    """Return the configuration for the arguments of `run`. Raises UserError for invalid ones."""
    words, shipped = words_in(list(overrides)), None
    if isinstance(experiment, Config):
        shipped = load(experiment.experiment) if words and is_shipped(experiment.experiment) else None
        config = load_text(to_yaml(experiment), experiment.experiment, words, shipped=shipped or False)
    elif isinstance(experiment, Mapping):  # read like a file
        tree, elsewhere = plain_here(experiment, "")
        config = load_text(write_yaml(checked(tree, "")), "experiment", words)
        if elsewhere is not None and config.engine.name != "inline":
            raise elsewhere
    elif isinstance(experiment, str | os.PathLike):
        return configured(experiment, words)
    else:
        raise UserError(f"experiment: got {shortened(experiment)}, takes a name such as 'digits', the path of a YAML file "
                        "or a dictionary")  # fmt: skip
    return with_default_objective(config, words, shipped)


@for_python
def resume(
    folder: str | os.PathLike[str],
    *overrides: str,
    progress: bool = False,
    tracking: Sequence[Any] | None = None,
    on_round: OnRound | None = None,
    on_reply: OnReply | None = None,
    on_finished: OnFinished | None = None,
) -> "Result":
    """Continue a run that was stopped, after its last committed round, and return its result.

    `overrides`: "rounds=20" gives the run more rounds, also a finished one. Nothing else can change.
    `tracking`: trackers, as in the key `tracking`, that replace those of the run; they also receive the earlier rounds.
    The callbacks are those of `run`. Raises UserError if the folder is not a run.
    """
    with as_usual():
        listener, callbacks = listener_for(quiet=not progress), Callbacks(on_round, on_reply)
        folder = path_of(folder)
        tracking = None if tracking is None else plain_value(tracking, "tracking", here=True)
        simulations.resume(folder, overrides, tracking=tracking, listener=listener, listeners=[callbacks])
    return _finished(folder, on_finished)


def _finished(folder: Path, on_finished: OnFinished | None) -> "Result":
    result = Result(folder)
    if on_finished is not None:
        on_finished(result)
    return result
