"""Options that several commands share."""

import ast
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from click.core import ParameterSource
from typer.core import TyperArgument

from fedloom.conf.errors import UserError
from fedloom.sims.report.tables import Table, clean

# The headings under which `fedloom --help` lists commands
RUN, FORGET, NETWORKS = "Runs", "Forgetting and proofs", "Networks"
MEASURE, OPERATE = "Published figures and speed", "Federations, clusters and web page"

Json = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON, the last on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def named(context: typer.Context, path: Path | None) -> Path | None:
    """Remember the run that a command names, for its closing line."""
    if path is not None and path.is_dir() and isinstance(runs := context.find_root().obj, list):
        runs.append(path)
    return path


RunPath = Annotated[Path, typer.Argument(help="A run's folder, such as runs/digits.", callback=named)]

_init = TyperArgument.__init__


def _init_with_help(self: TyperArgument, *, help: str | None = None, **options: Any) -> None:
    """Set the help again, which click 8.5 resets after typer 0.20 has set it."""
    _init(self, help=help, **options)
    self.help = help


TyperArgument.__init__ = _init_with_help  # type: ignore[method-assign]


def show_tables(*tables: Table, notes: Sequence[str] = (), err: bool = False) -> None:
    """Print tables and notes: tables with boxes in a terminal, as Markdown elsewhere."""
    from rich.console import Console

    if (console := Console(stderr=err)).is_terminal:
        console.print(*(table.rich() for table in tables), sep="\n")
    else:
        typer.echo("\n".join(table.plain() for table in tables), err=err)
    for note in notes:
        typer.echo(f"note: {clean(note)}", err=err)


def show_lines(lines: Mapping[str, str]) -> None:
    """Print names, each with its line, in two columns."""
    width = max(map(len, lines))
    for name, line in lines.items():
        typer.echo(f"{name:{width}} {line}")


def show_modules(modules: Mapping[str, str]) -> None:
    """Print the names that a command takes, with their meanings. Raises UserError if the command has an option."""
    context = click.get_current_context()
    named = [each for each in context.command.params
             if context.get_parameter_source(each.name or "") is ParameterSource.COMMANDLINE]  # fmt: skip
    if named:
        command = f"fedloom {context.info_name}"
        raise UserError(f"{named[0].opts[0]}: needs a name after '{command}'; '{command}' lists the names")
    show_lines(first_lines(modules))


def first_lines(modules: Mapping[str, str]) -> dict[str, str]:
    """Return the first line of each module's docstring, by name, without importing the modules, which takes seconds."""
    lines = {}
    for name, module in modules.items():
        spec = importlib.util.find_spec(module)
        source = Path(spec.origin if spec and spec.origin else os.devnull).read_text(encoding="utf-8")
        lines[name] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].rpartition("`: ")[2]
    return lines


def confirmed(question: str, agreed: object, command: str, otherwise: str) -> bool:
    """Return whether the user agrees. Ask, unless an option has already answered.

    Args:
        question: The question.
        agreed: Whether an option agrees. Then nothing is asked.
        command: The command's name, for errors.
        otherwise: What to do instead, for errors.

    Raises:
        UserError: The user interrupts, or stdin is not a terminal.
    """
    if agreed:
        return True
    if not sys.stdin.isatty():
        raise UserError(f"{command}: stdin is not a terminal, so no one can answer; nothing is changed ({otherwise})")
    try:
        return typer.confirm(question)
    except click.Abort:
        raise UserError(f"{command}: not confirmed; nothing is changed ({otherwise})") from None


def kinds(text: str, known: Sequence[str], option: str) -> list[str]:
    """Return the kinds of files in a text such as svg,pdf. Raises UserError for one that is not in `known`."""
    chosen = [part.strip().lower() for part in text.split(",")] if text else []
    for kind in chosen:
        if kind not in known:
            raise UserError(f"{option}: got '{kind}', takes {', '.join(known)}, separated by commas")
    return chosen


def numbers(text: str, option: str) -> list[float] | None:
    """Return the numbers in a text such as 0.3,0.7; None for an empty text. Raises UserError naming the option."""
    try:
        return [float(part) for part in text.split(",")] if text else None
    except ValueError:
        raise UserError(f"{option}: got '{text}', takes numbers such as 0.3,0.7") from None
