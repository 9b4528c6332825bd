"""What a domain's examples are: the kind of their inputs and of their targets."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.clients.data.form import IMAGE
from fedloom.conf.metrics import CLASS, MULTILABEL, REGRESSION, TOKENS

NEXT = TOKENS
TASKS = (CLASS, MULTILABEL, REGRESSION, NEXT)
IGNORED = -100  # the target of a step that does not count, such as padding
HIDDEN = "hidden "  # begins the names of categories' values that a site does not disclose
MOST_LISTED = 100  # values of a category in a message
MOST_LACKING = 5  # columns in a message that only some tables have
BYTE, WORD, UNIT = 255, 65_535, 1  # the brightest level of images: 8 bits, 16 bits, floats from 0 to 1


@dataclass(frozen=True)
class Schema:
    """The inputs and targets of a domain. Sites that train one network have the same schema.

    Attributes:
        kind: Of the inputs, one of form.KINDS.
        task: Of the targets, one of TASKS: int64 [n] class numbers, float32 [n, labels] of 0 and 1, float32 [n, numbers],
            or int64 [n, steps] next tokens (IGNORED: no target).
        shape: Of one input. Empty for images, whose shape is configured (`data.size`, `data.grey`).
        columns: Names of the features of a table; empty if they have none.
        vocabulary: tokens: the number of different tokens.
        levels: image: the brightest level, BYTE, WORD or UNIT.
    """

    kind: str = IMAGE
    task: str = CLASS
    shape: tuple[int, ...] = ()
    columns: tuple[str, ...] = ()
    vocabulary: int = 0
    levels: int = BYTE

    def difference(self, other: "Schema") -> str:
        """Return what two schemas do not share, as "NAME: ONE and OTHER"; empty if one network can take both."""
        named = self.columns and other.columns
        if named and (odd := sorted(set(self.columns) ^ set(other.columns))):
            return f"column '{odd[0]}' is only in the {'first' if odd[0] in self.columns else 'second'}"
        if named and self.columns != other.columns:
            return "the same columns in another order; list them in one order with ?features=A,B"
        for name in ("kind", "task", "shape"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and not (name == "shape" and self.kind == other.kind == IMAGE):
                return f"{name}: {_text(mine)} and {_text(theirs)}"
        return ""


def categories_of(tables: Sequence[Sequence[str]]) -> str:
    """Return the option `?categories=` with which these tables have the same columns; empty if no category differs.

    Args:
        tables: The names of each table's columns: "COLUMN=VALUE" for a category.
    """
    values = [{(name, value) for name, is_value, value in (column.partition("=") for column in table) if is_value}
              for table in tables]  # fmt: skip
    union, lacking = sorted(set().union(*values)), columns_lacking(tables)
    differing = {name for name, value in union if any((name, value) not in table for table in values)}.difference(lacking)
    parts = []
    for name in sorted(differing):
        named = [value for other, value in union if other == name]
        can_list = len(named) <= MOST_LISTED and all(_plain(value) and not value.startswith(HIDDEN) for value in named)
        parts.append(f"{name}:{'|'.join(named)}" if can_list else f"{name}:#16")
    return f"?categories={','.join(parts)}" if parts else ""


def columns_lacking(tables: Sequence[Sequence[str]]) -> list[str]:
    """Return the columns that some of these tables have and others lack. Arguments as `categories_of`."""
    names = [{column.partition("=")[0] for column in table} for table in tables]
    return sorted(set().union(*names) - set.intersection(*names)) if names else []


def without_of(tables: Sequence[Sequence[str]]) -> str:
    """Return the option `?without=` with which these tables have the same columns; empty if it would not be a short one."""
    names = columns_lacking(tables)
    return f"?without={','.join(names)}" if 0 < len(names) <= MOST_LACKING and all(map(_plain, names)) else ""


def _plain(text: str) -> bool:
    """Return whether a name can stand in a domain's options as it is."""
    return bool(text) and not set(text) & set(",|&+%#;") and text == text.strip()


def hidden_categories(columns: Sequence[str]) -> list[str]:
    """Return names of columns in which a digest of all values of a category stands for each value."""
    named = [column.partition("=") for column in columns]
    joined = {name: "|".join(value for other, _, value in named if other == name) for name, _, _ in named}
    digests = {name: hashlib.sha256(values.encode()).hexdigest()[:8] for name, values in joined.items()}
    return [f"{name}={HIDDEN}{digests[name]}" if is_value else name for name, is_value, _ in named]


IMAGES = Schema()  # of labelled images of 8 bits


def _text(item: object) -> str:
    return str(list(item)) if isinstance(item, tuple) else str(item)
