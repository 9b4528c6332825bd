"""The command `fedloom`: its start and end, and the command `run`."""

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import click
import typer

from fedloom.conf import UserError
from fedloom.conf.errors import DroppedWarning, FailedError, MissingDataError, of_files, plain
from fedloom.sims.cli import about, cluster, federation, networks, one_run, runs, serve
from fedloom.sims.cli.options import OPERATE, RUN, Json, Quiet
from fedloom.sims.process import Ending, listen
from fedloom.sims.progress.output import VARIABLE, fault, line_of, make_lenient, wants_json
from fedloom.sims.progress.waiting import LIBRARIES, waiting

if TYPE_CHECKING:
    from fedloom.conf.schema import Config

app = typer.Typer(
    suggest_commands=False,  # click suggests them
    name="fedloom",
    help="Train networks at many sites, fuse them into one network, and forget single sites exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

INTERRUPTED = 130
EMBEDDED = "preset=embedded"


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata  # slow to import

        typer.echo(f"fedloom {metadata.version('fedloom')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Declare the options of the whole command."""
    wants_json()  # refuses other values of the variable at once


@app.command(rich_help_panel=RUN)
def run(
    experiment: Annotated[str, typer.Argument(help="A shipped experiment, or a YAML file.")] = "digits",
    overrides: Annotated[list[str] | None, typer.Argument(help="Changed keys: rounds=20 engine.workers=2.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the whole configuration and exit.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing run of the same name.")] = False,
    seeds: Annotated[
        str | None,
        typer.Option(help="One run for each seed: 0,1,2. Finished runs are not repeated, stopped runs are resumed."),
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="One run for each value: training.rate=0.01,0.03. Repeatable.")
    ] = None,
    parallel: Annotated[
        str, typer.Option(help="Number of runs at the same time, which share the machine; auto: as many as fit.")
    ] = "1",
    best: Annotated[
        str, typer.Option(help="Name the best values by this metric on validation examples, as the mean over seeds.")
    ] = "",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run an experiment, with results in runs/<name>/. With --seeds or --sweep: several runs, each in its own folder."""
    began, words = time.monotonic(), list(overrides or [])
    if "=" in experiment:  # fedloom run rounds=3: the default experiment
        words, experiment = [experiment, *words], "digits"
    if seeds is not None or sweep:
        with waiting("reading the configuration", quiet):
            from fedloom.sims.cli import many

        order = many.SweepOrder(experiment, words, seeds, sweep or [], parallel, overwrite, best)
        raise typer.Exit(many.show(order) if show else many.run(order, quiet=quiet, as_json=as_json))
    for option in [*(["--parallel"] if parallel != "1" else []), *(["--best"] if best else [])]:
        raise UserError(f"{option}: needs several runs; add --seeds 0,1,2 or --sweep key=value,value")
    with waiting("reading the configuration", quiet):
        from fedloom.sims.operations.configured import configured

    with warnings.catch_warnings(record=True) as caught:
        config = configured(experiment, [*words, *(["run.overwrite=true"] if overwrite else [])])
    notes = [str(each.message) for each in caught if issubclass(each.category, DroppedWarning)]
    for other in (each for each in caught if not issubclass(each.category, DroppedWarning)):
        warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    if show:
        from fedloom.sims.operations.options import with_options

        text = with_options(config)
        for note in notes:
            typer.echo(f"note: {plain(note)}", err=True)
        typer.echo(text, nl=False)
    else:
        _simulate(config, began, notes, quiet=quiet, as_json=as_json)


def _simulate(config: "Config", began: float, notes: Sequence[str], *, quiet: bool, as_json: bool) -> None:
    """Run one configuration, and print its summary if `as_json`. `notes`: lines to show before the run."""
    with waiting(LIBRARIES, quiet):
        from fedloom.sims.operations.simulate import simulate
        from fedloom.sims.progress.listeners import listener_for

    try:
        summary = simulate(config, listener=listener_for(quiet, json_output=as_json), notes=notes, began=began)
    except MissingDataError as error:
        from fedloom.conf.loading import has_preset

        hint = f"; {EMBEDDED} needs no data" if has_preset(config.experiment, EMBEDDED.partition("=")[2]) else ""
        raise UserError(f"{error}{hint}") from None
    if as_json:
        typer.echo(json.dumps(summary))


app.add_typer(one_run.app)
app.add_typer(about.app)
app.add_typer(networks.app)
app.add_typer(runs.app)
app.add_typer(serve.app, name="serve", rich_help_panel=OPERATE)
app.add_typer(federation.app, name="federation", rich_help_panel=OPERATE)
app.add_typer(cluster.app, name="cluster", rich_help_panel=OPERATE)


def main() -> NoReturn:
    """Run the command line. Exit codes: 2 for bad input, with one line; 130 if interrupted; 1 for a failed run."""
    make_lenient()
    ending = Ending()
    listen()
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    sys.argv[1:] = [_at_home(word) for word in sys.argv[1:]]
    _import_from_here()
    code = _guarded()
    ending.leave(_say(f"standard output: {lost}; the output is incomplete", 2) if (lost := fault()) else code)


def _at_home(word: str) -> str:
    """Expand ~ at the start of a path, also in --out=~/x, which shells do not expand."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{option}{equals}{os.path.expanduser(value)}" if value.startswith("~/") else word


def _import_from_here() -> None:
    """Let `module:attribute` in a configuration name modules in the current folder. Installed modules come first."""
    with contextlib.suppress(OSError):  # the folder does not exist any longer
        sys.path.append(os.getcwd())


def _guarded() -> int:
    with warnings.catch_warnings():
        warnings.showwarning = partial(_show_warning, warnings.showwarning)
        return _outcome()


def _show_warning(usual: Callable[..., None], message: Warning | str, category: type[Warning], *rest: Any) -> None:
    """Show a DroppedWarning as a line without its place in the code."""
    if issubclass(category, DroppedWarning):
        typer.echo(f"note: {plain(str(message))}", err=True)
    else:
        usual(message, category, *rest)


def _outcome() -> int:
    """Run the command, and return the exit code."""
    named: list[Path] = []
    try:
        if (code := int(app(standalone_mode=False, obj=named) or 0)) == INTERRUPTED:  # typer's exit code for Ctrl-C
            raise KeyboardInterrupt
        _say_waiting(named)
        return code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:  # a wrong option
        return _say(_of_option(error), error.exit_code)
    except UserError as error:
        return _say(str(error), 2, error.trace)
    except FailedError as error:
        return _say(str(error), 1)
    except Exception as error:
        if isinstance(known := _known(error), UserError):
            return _say(str(known), 2, known.trace)
        raise
    except SystemExit as error:  # only code from outside calls exit
        return _say(f"code from outside called exit({error.code!r}); committed rounds are saved", 1)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted; committed rounds are saved in the run's folder", INTERRUPTED)


def _known(error: Exception) -> Exception:
    """Return an error of the disk, or of the user's own strategy, as UserError; else return it unchanged."""
    if isinstance(error, OSError) and (text := of_files(error)):
        return UserError(text)
    from fedloom.server.strategies.base import named  # imported only here: few commands fail so

    return named(error, "")


def _say_waiting(runs: Sequence[Path]) -> None:
    """Say how many requests wait in the runs that the command named."""
    if not runs:
        return
    from fedloom.server.run_folder.listing import waiting as requests

    for run in runs:
        if many := len(requests(run)):
            wait = "request waits" if many == 1 else "requests wait"
            typer.echo(f"note: {many} {wait} in {run}; `fedloom requests {run}` shows more", err=True)


def _of_option(error: click.ClickException) -> str:
    """Return the line about a wrong command or option: what is wrong, and which help lists the right ones."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "fedloom"
    fault = " ".join(error.format_message().split()).rstrip(".")
    return f"{fault} See '{command} --help'" if fault.endswith("?") else f"{fault}; see '{command} --help'"


def _say(text: str, code: int, trace: str = "") -> int:
    """Show an error, and below it the lines of the user's own code that failed, and return the exit code."""
    line = plain(text)  # an error of a user's class may have several lines
    as_json = os.environ.get(VARIABLE) == "json"
    typer.echo(line_of(line, "error") if as_json else f"fedloom: {line}", err=True)
    if trace and not as_json:
        typer.echo(trace, err=True)
    return code
