"""The command `fedloom`."""

import _thread
import contextlib
import errno
import inspect
import json
import os
import signal
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
import typer

from conf import UserError, load
from conf.errors import FailedError, plain
from sims.cli import federation, heads, networks, runs
from sims.cli.named import named
from sims.cli.options import numbers
from sims.report.tables import Table

app = typer.Typer(
    suggest_commands=False,  # click does it
    name="fedloom",
    help="Train many networks in a federation, weave them into one, and pull single threads out again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

INTERRUPTED = 130
NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)

Json = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON, last on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]


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
    seeds: Annotated[str, typer.Option(help="A run for each: 0,1,2. Finished ones are kept, half-done ones go on.")] = "",
    sweep: Annotated[list[str] | None, typer.Option(help="A run for each: training.rate=0.01,0.03; repeatable.")] = None,
    parallel: Annotated[int, typer.Option(help="So many runs at a time, each with its part of the machine.", min=1)] = 1,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run an experiment; results land in runs/<name>/. With --seeds or --sweep: many, each in a folder of its own."""
    words = list(overrides or [])
    if "=" in experiment:  # fedloom run rounds=3: the default experiment
        words, experiment = [experiment, *words], "digits"
    if seeds or sweep:
        from sims.cli import many

        order = many.Order(experiment, words, seeds, sweep or [], parallel, overwrite)
        raise typer.Exit(many.show(order) if show else many.run(order, quiet=quiet, as_json=as_json))
    if parallel > 1:
        raise UserError("--parallel: is for many runs; say which with --seeds 0,1,2 or --sweep key=value,value")
    from server.strategies.pairing import paired

    config = paired(load(experiment, [*words, *(["run.overwrite=true"] if overwrite else [])]), words)
    if show:
        from sims.cli.keys import with_options

        typer.echo(with_options(config), nl=False)
        return
    if not config.run.resume:
        from server.runs import refuse_existing

        refuse_existing(config)  # at once: what simulates takes seconds to import
    from sims.simulate import simulate

    summary = simulate(config, quiet=quiet, json_output=as_json)
    if as_json:
        typer.echo(json.dumps(summary))


RunPath = Annotated[Path, typer.Argument(help="A run's folder, such as runs/digits.")]
Sites = Annotated[list[str], typer.Argument(help="Names of sites, such as site-0001.")]


@app.command()
def resume(run: RunPath, quiet: Quiet = False, as_json: Json = False) -> None:
    """Go on with a run that was stopped or killed, after its last committed round."""
    from sims.cli.unlearn import resume as go_on

    summary = go_on(run, quiet=quiet, json_output=as_json)
    if as_json:
        typer.echo(json.dumps(summary))


@app.command()
def unlearn(
    run: RunPath,
    sites: Sites,
    request_id: Annotated[str, typer.Option(help="Its name; the same one again changes nothing.")] = "",
    reason: Annotated[str, typer.Option(help="Why, for the ledger and the certificate.")] = "",
    repair: Annotated[int, typer.Option(help="Rounds to train further without the sites.", min=0)] = 0,
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Fit the aggregate's head anew to sums that the other sites tell.")
    ] = False,
    retrain: Annotated[bool, typer.Option("--retrain", help="Train a network without them, to compare with.")] = False,
    rollback: Annotated[bool, typer.Option("--rollback", help="Go back to before they took part, train again.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Remove sites: subtract and delete what they gave, and write a certificate. A running server does it between rounds."""
    from sims.cli.unlearn import Wish
    from sims.cli.unlearn import unlearn as fulfil

    text, done = fulfil(run, Wish(sites, request_id, reason, repair, retrain, rollback, recalibrate), quiet=quiet or as_json)
    typer.echo(text)
    if as_json:
        typer.echo(json.dumps(done))


@app.command()
def readmit(
    run: RunPath,
    sites: Sites,
    node: Annotated[int | None, typer.Option(help="It is at this node of Flower's now, and may have what it gave.")] = None,
) -> None:
    """Let forgotten sites take part again; with --node: vouch for a site that came back as another node."""
    from sims.cli.unlearn import readmit as take_back

    typer.echo(take_back(run, sites, node))


@app.command()
def compose(
    run: RunPath,
    sites: Annotated[str, typer.Option(help="Their names: site-0001,site-0004")],
    coefficients: Annotated[str, typer.Option(help="One for each: 0.5,0.7; default: as the run does.")] = "",
    how: Annotated[str, typer.Option(help="gradients or weights; default: as the run does.")] = "",
    start: Annotated[Path | None, typer.Option(help="Assign the gradients to this network instead of theta_0.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Even if it is not the one that the sites started from.")] = False,
    measure: Annotated[bool, typer.Option(help="Say what the network knows (needs the data).")] = True,
    out: Annotated[Path, typer.Option(help="Where the network goes.")] = Path("net.safetensors"),
) -> None:
    """Make a network of some of a run's sites alone, from what they contributed: nothing is trained."""
    from sims.cli import compose as make

    order = make.Order(sites.split(","), numbers(coefficients, "--coefficients") or (), how, start, force, measure)
    typer.echo("\n".join(table.markdown() for table in make.compose(run, order, out)))
    typer.echo(f"written: {out}")


@app.command()
def verify(
    certificate: Annotated[Path, typer.Argument(help="certificates/<request>.json")],
    run: Annotated[Path | None, typer.Argument(help="The run's folder; not needed with --key.")] = None,
    key: Annotated[str, typer.Option(help="The operator's public key, a file or its line: check the signature.")] = "",
) -> None:
    """Compare a certificate with a run's ledger: recompute what can be recomputed (exit code 1: a mismatch)."""
    from sims.cli.unlearn import verify_certificate

    table, good = verify_certificate(certificate, run, key)
    typer.echo(table.markdown())
    raise typer.Exit(0 if good else 1)


@app.command()
def key() -> None:
    """Print the public key by which others can check this operator's certificates."""
    from server.unlearning.signing import operator_key, public_line

    typer.echo(public_line(operator_key()))


@app.command()
def ledger(
    run: RunPath,
    check: Annotated[bool, typer.Option("--check", help="Verify chain, blobs and sum (exit code 1: problems).")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Remove blobs that nothing refers to.")] = False,
    as_json: Json = False,
) -> None:
    """List a run's events, or check all that is kept of it."""
    from sims.cli import unlearn
    from sims.cli.progress import listener_for

    found: dict[str, Any] = {}
    if prune:
        found["removed"] = unlearn.prune(run)
        typer.echo(f"{len(found['removed'])} files removed")
    if check:
        with listener_for(quiet=as_json):
            found |= unlearn.audit(run)
        for line in found["problems"] or ["no problems"]:
            typer.echo(line)
        for line in found["notes"]:
            typer.echo(f"note: {line}")
    if not (check or prune):
        found["events"] = unlearn.events(run)
        typer.echo(unlearn.events_table(run, found["events"]).markdown())
    if as_json:
        typer.echo(json.dumps(found))
    raise typer.Exit(0 if found.get("ok", True) else 1)


@app.command()
def options(
    section: Annotated[str, typer.Argument(help="training, strategy, strategy.cla_ot, sites.partition; none: all.")] = "",
) -> None:
    """List the keys of a configuration, with what they take, their defaults and their meaning."""
    from rich.console import Console

    from sims.cli.keys import table

    found, console = table(section), Console()
    console.print(found.rich()) if console.is_terminal else typer.echo(found.markdown(), nl=False)


@app.command()
def experiments() -> None:
    """List the experiments that ship."""
    from conf.load import experiment_lines

    for name, line in experiment_lines().items():
        typer.echo(f"{name:16} {line}")


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run's folder, such as runs/digits.")]) -> None:
    """Draw a run's plots and write its report.html again."""
    from sims.report.report import write_report

    typer.echo(write_report(run))


@app.command()
def reproduce(
    what: Annotated[
        str,
        typer.Argument(
            help="aggregation, arithmetic, cla, components, fusion, lasem, skill_transfer, strategies, unlearning."
        ),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for every run, such as engine.workers=2")] = None,
    preset: Annotated[str, typer.Option(help="cpu: minutes on two cores; paper: the paper's size, for a GPU.")] = "cpu",
    seeds: Annotated[int, typer.Option(help="Runs of each method.", min=1)] = 5,
    table: Annotated[str, typer.Option(help="Where there are several: these alone, such as figure2,steps.")] = "",
    quiet: Quiet = False,
) -> None:
    """Measure a paper's tables again, its cells beside ours; runs that are finished already are not run again."""
    from sims.experiments import MODULES

    asked = [*(overrides or []), *([f"tables={table}"] if table else [])]
    folder = named("reproduction", what, MODULES, "reproduce")(preset, seeds, asked, quiet=quiet)
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
    from sims.benchmarks import MODULES

    measure = named("benchmark", what, MODULES, "bench")
    given = {"quick": quick, "out": out}
    tables, rows = measure(**{name: given[name] for name in inspect.signature(measure).parameters if name in given})
    for table in [tables] if isinstance(tables, Table) else tables:
        typer.echo(table.markdown(), err=as_json)
    if as_json:
        typer.echo(json.dumps({"rows": rows}))


@app.command()
def doctor(
    root: Annotated[str, typer.Option("--data", help="The folder with the data (data.root).")] = "",
    federation: Annotated[Path | None, typer.Option(help="Look at a real federation's folder, or at one machine's.")] = None,
) -> None:
    """Say what this machine has: versions, cores, GPUs, Ray, and where each domain would come from."""
    from rich.console import Console

    if federation is not None:
        from sims.federation.checks import check

        rows = [list(row) for row in check(federation)]
        Console().print(Table(str(federation), ["machine", "what", "found"], rows).rich())
        return
    from conf.schema import DataConfig
    from sims.cli.doctor import doctor as examine
    from sims.cli.doctor import doctor_table

    Console().print(doctor_table(examine(DataConfig(root=root))).rich())


app.add_typer(networks.app)
app.add_typer(heads.app)
app.add_typer(runs.app)
app.add_typer(federation.app, name="federation")


def main() -> NoReturn:
    """Run the command line. Bad input: one line and exit code 2; interrupted: 130; a run that failed: 1."""
    listen()
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    _import_from_here()
    sys.exit(_guarded())


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
        if error.errno in NO_PATH:
            return _say(f"{plain(str(error.filename))[:200]}: {error.strerror}; give another path", 2)
        if error.errno not in DISK:
            raise
        return _say(f"{error.filename or 'the disk'}: {error.strerror}; make room or mend permissions, then resume", 2)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted; what was committed is kept in the run's folder", INTERRUPTED)


def _say(text: str, code: int) -> int:
    typer.echo(f"fedloom: {text}", err=True)
    return code


def listen() -> None:
    """Be interrupted by SIGINT, even where the shell started us with it ignored, and by SIGTERM, at whatever moment."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _again


def _terminate(*_: Any) -> None:
    raise KeyboardInterrupt


def _interrupt() -> None:
    """A signal to another thread would not end a wait; Windows has none to a thread."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    else:
        _thread.interrupt_main()


def _again(ignored: Any) -> None:
    """An interruption while an object is destroyed goes no further than there: hear it again."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        threading.Timer(0.1, _interrupt).start()
    else:
        sys.__unraisablehook__(ignored)
