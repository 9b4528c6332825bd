"""What options of the command line hold."""

from conf.errors import UserError


def numbers(text: str, option: str) -> list[float] | None:
    """The numbers in a text such as 0.3,0.7; None if it is empty. Raises UserError naming the option."""
    try:
        return [float(part) for part in text.split(",")] if text else None
    except ValueError:
        raise UserError(f"{option}: got '{text}', takes numbers such as 0.3,0.7") from None
