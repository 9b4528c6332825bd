"""What options of the command line hold."""

from typing import Annotated

import typer

from fedloom.conf.errors import UserError

Json = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON, last on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]


def numbers(text: str, option: str) -> list[float] | None:
    """The numbers in a text such as 0.3,0.7; None if it is empty. Raises UserError naming the option."""
    try:
        return [float(part) for part in text.split(",")] if text else None
    except ValueError:
        raise UserError(f"{option}: got '{text}', takes numbers such as 0.3,0.7") from None
