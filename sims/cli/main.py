"""The command `fedloom`."""

import contextlib
import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
import typer

from fedloom.conf import UserError
from fedloom.conf.errors import FailedError, of_files, unknown
from fedloom.conf.schema import Config
from fedloom.sims.cli import about, cluster, federation, networks, one_run, runs
from fedloom.sims.cli.options import Json, Quiet
from fedloom.sims.process import Ending, listen
from fedloom.sims.progress.output import fault, make_lenient
from fedloom.sims.progress.waiting import LIBRARIES, waiting
from fedloom.sims.report.tables import Table

app = typer.Typer(
    suggest_commands=False,  # click does it
    name="fedloom",
    help="Train many networks in a federation, weave them into one, and pull single threads out again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

INTERRUPTED = 130


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedloom {metadata.version('fedloom')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and stop.")] = False,
) -> None:
    """Options of the whole command."""


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="A shipped experiment, or the path of a YAML file.")] = "digits",
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, dotted keys: rounds=20 engine.workers=2")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the merged configuration and stop.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run of the same name.")] = False,
    seeds: Annotated[
        str | None, typer.Option(help="A run for each: 0,1,2. Finished ones are kept, half-done ones go on.")
    ] = None,
    sweep: Annotated[list[str] | None, typer.Option(help="A run for each: training.rate=0.01,0.03; repeatable.")] = None,
    parallel: Annotated[int, typer.Option(help="So many runs at a time, each with its part of the machine.", min=1)] = 1,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run an experiment; results land in runs/<name>/. With --seeds or --sweep: many, each in a folder of its own."""
    began, words = time.monotonic(), list(overrides or [])
    if "=" in experiment:  # fedloom run rounds=3: the default experiment
        words, experiment = [experiment, *words], "digits"
    if seeds is not None or sweep:
        with waiting("reading the configuration", quiet):
            from fedloom.sims.cli import many

        order = many.SweepOrder(experiment, words, seeds, sweep or [], parallel, overwrite)
        raise typer.Exit(many.show(order) if show else many.run(order, quiet=quiet, as_json=as_json))
    if parallel > 1:
        raise UserError("--parallel: is for many runs; say which with --seeds 0,1,2 or --sweep key=value,value")
    with waiting("reading the configuration", quiet):
        from fedloom.sims.operations.configured import configured

    config = configured(experiment, [*words, *(["run.overwrite=true"] if overwrite else [])])
    if show:
        from fedloom.sims.operations.options import with_options

        typer.echo(with_options(config), nl=False)
    else:
        _simulate(config, began, quiet=quiet, as_json=as_json)


def _simulate(config: Config, began: float, *, quiet: bool, as_json: bool) -> None:
    """Run it, and print its summary where that is asked for."""
    if not config.run.resume:
        from fedloom.server.run_folder.listing import refuse_existing

        refuse_existing(config)  # at once: what simulates takes seconds to import
    with waiting(LIBRARIES, quiet):
        from fedloom.sims.operations.simulate import simulate
        from fedloom.sims.progress.listeners import listener_for

    summary = simulate(config, listener=listener_for(quiet, json_output=as_json), began=began)
    if as_json:
        typer.echo(json.dumps(summary))


@app.command()
def reproduce(
    what: Annotated[
        str,
        typer.Argument(
            help="aggregation, arithmetic, cla, components, different_depths, fusion, lasem, skill_transfer, strategies, "
            "unlearning."
        ),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for every run, such as engine.workers=2")] = None,
    preset: Annotated[str, typer.Option(help="cpu: minutes on two cores; paper: the paper's size, for a GPU.")] = "cpu",
    seeds: Annotated[int, typer.Option(help="Runs of each method.", min=1)] = 5,
    table: Annotated[str, typer.Option(help="Where there are several: these alone, such as figure2,steps.")] = "",
    quiet: Quiet = False,
) -> None:
    """Measure a paper's tables again, its cells beside ours; runs that are finished already are not run again."""
    from fedloom.sims.experiments import MODULES

    asked = [*(overrides or []), *([f"tables={table}"] if table else [])]
    folder = _named("reproduction", what, MODULES, "reproduce")(preset, seeds, asked, quiet=quiet)
    typer.echo((folder / "tables.md").read_text(encoding="utf-8"))
    typer.echo(f"written: {folder}/tables.md and {folder}/report.html")


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="engines, faults, flat-memory, fusion, grid, memory, unlearning, ...")],
    quick: Annotated[bool, typer.Option("--quick", help="engines: fewer rounds, within four minutes.")] = False,
    out: Annotated[Path, typer.Option(help="engines: folder for tables, rows, plot and page.")] = Path("runs/bench"),
    as_json: Json = False,
) -> None:
    """Measure time or memory on this machine."""
    from fedloom.sims.benchmarks import MODULES

    measure = _named("benchmark", what, MODULES, "bench")
    options = {"quick": quick, "out": out}
    tables, rows = measure(**{name: options[name] for name in inspect.signature(measure).parameters if name in options})
    for table in [tables] if isinstance(tables, Table) else tables:
        typer.echo(table.plain(), err=as_json)
    if as_json:
        typer.echo(json.dumps({"rows": rows}))


app.add_typer(one_run.app)
app.add_typer(about.app)
app.add_typer(networks.app)
app.add_typer(runs.app)
app.add_typer(federation.app, name="federation")
app.add_typer(cluster.app, name="cluster")


def _named(kind: str, name: str, modules: Mapping[str, str], function: str) -> Callable[..., Any]:
    """The function of the module that `modules` files under `name`; UserError with the nearest name otherwise."""
    if name not in modules:
        raise unknown(kind, name, modules)
    return getattr(importlib.import_module(modules[name]), function)


def main() -> NoReturn:
    """Run the command line. Bad input: one line and exit code 2; interrupted: 130; a run that failed: 1."""
    make_lenient()
    ending = Ending()
    listen()
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    sys.argv[1:] = [_at_home(word) for word in sys.argv[1:]]
    _import_from_here()
    code = _guarded()
    ending.leave(_say(f"standard output: {lost}; what it was to show is not whole", 2) if (lost := fault()) else code)


def _at_home(word: str) -> str:
    """A word with the home's whole path for ~ where a path begins: --out=~/x, which shells leave as it is."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{option}{equals}{os.path.expanduser(value)}" if value.startswith("~/") else word


def _import_from_here() -> None:
    """Let `module:attribute` in a configuration find the user's modules, as in a script of theirs; ours come first."""
    with contextlib.suppress(OSError):  # the folder is gone
        sys.path.append(os.getcwd())


def _guarded() -> int:
    try:
        if (code := int(app(standalone_mode=False) or 0)) == INTERRUPTED:  # typer's answer to Ctrl-C
            raise KeyboardInterrupt
        return code
    except click.ClickException as error:  # a wrong option: click says so itself
        error.show()
        return error.exit_code
    except UserError as error:
        return _say(str(error), 2)
    except FailedError as error:
        return _say(str(error), 1)
    except OSError as error:
        if not (text := of_files(error)):
            raise
        return _say(text, 2)
    except SystemExit as error:  # ours does not
        return _say(f"code from outside called exit({error.code!r}); what was committed is kept", 1)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted; what was committed is kept in the run's folder", INTERRUPTED)


def _say(text: str, code: int) -> int:
    typer.echo(f"fedloom: {text}", err=True)
    return code
