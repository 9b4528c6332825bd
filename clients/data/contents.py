"""The contents of a user's domain from arrays: their inputs and targets are checked and converted."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedloom.clients.data import inputs, targets
from fedloom.clients.data.arrays import Labelled
from fedloom.clients.data.form import FEATURES, PADDING, TOKENS
from fedloom.clients.data.found import Contents, Select, asking, fitting
from fedloom.clients.data.schema import CLASS, Schema
from fedloom.clients.data.sources import Labels


def of_arrays(parts: Mapping[str, Labelled], domain: str, left_out: tuple[str, ...] = ()) -> Contents:
    """Check the arrays of a domain, and return them as its contents.

    Args:
        parts: Inputs and targets by part, such as train and test.
        domain: The domain's name, for errors.
        left_out: Descriptions of files and examples that are not read.

    Raises:
        UserError: The shapes or types of inputs or targets fit no known kind.
    """
    with fitting(domain):
        read = {part: inputs.convert(named.inputs, len(named.targets), named.kind) for part, named in parts.items()}
        schema = _joined([schema for _, schema in read.values()])
        first = next(iter(parts.values()))
        labels, schema, outputs, names = targets.convert(parts, replace(schema, columns=first.columns), first.task)

    def reader(part: str) -> Select:
        held = read[part][0]
        return lambda index: held[index] if isinstance(held, np.ndarray) else [held[position] for position in index]

    notes = _padded([held for held, _ in read.values()]) if schema.kind == TOKENS else ()
    if schema.task == CLASS and not (first.names or first.task or isinstance(np.asarray(first.targets).flat[0], str)):
        notes += _assumed(np.concatenate(list(labels.values())), names, schema.kind == FEATURES, domain)
    selects = {part: reader(part) for part in read}
    return Contents(labels, selects, outputs, names, left_out=left_out, schema=schema, notes=notes)


def _assumed(classes: Labels, names: tuple[str, ...], features: bool, domain: str) -> tuple[str, ...]:
    """Return a line that says that whole numbers are classes: those with gaps (`names`), and more than two of features."""
    values = list(map(str, np.unique(classes))) if not names else list(names)
    known = f" with these {'numbers' if len(values) > 1 else 'number'} as names" if names else ""
    numbers = f"the targets are whole numbers from {values[0]} to {values[-1]}, taken as {len(values)} classes{known}"
    write = [f"{asking(domain, 'task=regression')} to predict numbers"] if features and len(values) > 2 else []
    write += [f"{asking(domain, 'task=class')} for all classes from 0 to {values[-1]}"] if names else []
    return (f"{numbers}; write {', or '.join(write)}",) if write else ()


def _padded(parts: list[np.ndarray]) -> tuple[str, ...]:
    """Return a warning if token sequences begin with padding: networks read the last token that is not padding."""
    odd = sum(int(((tokens[:, 0] == PADDING) & (tokens != PADDING).any(1)).sum()) for tokens in parts)
    return (f"{odd} token sequences begin with padding ({PADDING}); put it behind the last token",) if odd else ()


def _joined(schemas: list[Schema]) -> Schema:
    """Return the schema of train and test together. Raises ValueError if their inputs differ in kind or shape."""
    first = schemas[0]
    if difference := next(filter(None, (first.difference(other) for other in schemas[1:])), ""):
        raise ValueError(f"has different inputs in train and test ({difference})")
    vocabulary, levels = max(one.vocabulary for one in schemas), {one.levels for one in schemas}
    if len(levels) > 1:
        raise ValueError("has images of 8 bits, 16 bits or floats in train and others in test; save both in the same way")
    return replace(first, vocabulary=vocabulary)
