"""Standardise inputs, and targets that are numbers: subtract the mean over training examples, divide by the deviation.

`data.standardise` says whose examples: the site's own, or those of all sites, from exact sums (fusion.wide). A feature with
the same value in all examples becomes 0. Losses are in standardised units. Predictions are brought back to the targets' unit
before they are measured (clients.networks.head_view).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedloom.clients.data.examples import Examples
from fedloom.clients.data.form import ARRAY, FEATURES, SEQUENCE
from fedloom.clients.data.forms import schema_of
from fedloom.clients.data.schema import REGRESSION, Schema
from fedloom.clients.data.variants import domain_specs
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.fusion.state import State
from fedloom.fusion.wide import BITS, LARGEST, PARTS, mean_and_deviation, wide_sums

KEY = "data.standardise"
NONE, SITE, SITES = "none", "site", "sites"
STATISTICS = "feature_statistics"  # the question to sites, the record of their answers, and the slot
STANDARDISATION = "standardisation"  # down: mean and deviation
INPUTS, TARGETS = "inputs", "targets"
COUNT, SUM, SQUARE, MEAN, DEVIATION = ".count", ".sum", ".square", ".mean", ".deviation"
ROWS = 2**16  # examples that are converted at once
MOST_EXAMPLES = 2**31  # of a site
FEWEST = 8  # examples of a real site whose sums it discloses: of one, the sums are the example

Pair = tuple[Tensor, Tensor]  # mean and deviation
_SUMS: WeakKeyDictionary[Examples, State] = WeakKeyDictionary()


def first_schema(config: Config) -> Schema:
    """Return the schema of the run's examples."""
    return schema_of(config, next(iter(domain_specs(config).values())))


def way_of(config: Config) -> str:
    """Return how the run standardises: NONE, SITE or SITES. Raises UserError if its examples have nothing to standardise."""
    way, schema = config.data.standardise, first_schema(config)
    if way in (SITE, SITES) and not parts_of(schema):
        raise UserError(f"{KEY}: '{way}' is for features, sequences, arrays and numbers to predict, but the inputs are of "
                        f"kind {schema.kind}; set {KEY}=none")  # fmt: skip
    return way or (SITES if schema.kind in (FEATURES, SEQUENCE) else NONE)


def parts_of(schema: Schema) -> tuple[str, ...]:
    """Return what is standardised: INPUTS of floats, and TARGETS that are numbers."""
    inputs = (INPUTS,) if schema.kind in (FEATURES, SEQUENCE, ARRAY) else ()
    return (*inputs, *((TARGETS,) if schema.task == REGRESSION else ()))


def columns_of(schema: Schema, outputs: int) -> dict[str, int]:
    """Return the numbers of columns of each standardised part. An array has a column for each entry."""
    shape = schema.shape[-1:] if schema.kind == SEQUENCE else schema.shape
    widths = {INPUTS: torch.Size(shape).numel(), TARGETS: outputs}
    return {part: widths[part] for part in parts_of(schema)}


# Sums


def empty_sums(schema: Schema, outputs: int) -> State:
    """Return sums over no examples, with the names, shapes and types of a site's answer."""
    sizes = {COUNT: (1,), SUM: (PARTS,), SQUARE: (2 * PARTS,)}
    return {part + name: torch.zeros(*size, *((columns,) if name != COUNT else ()), dtype=torch.int64)
            for part, columns in columns_of(schema, outputs).items() for name, size in sizes.items()}  # fmt: skip


def sums_of(images: Examples, schema: Schema) -> State:
    """Return the exact sums over examples: their number, and each column's sum and sum of squares (fusion.wide).

    Raises:
        UserError: An entry is too large.
    """
    if images not in _SUMS:
        sums: State = {}
        for part in parts_of(schema):
            rows = _rows(images, schema, part)
            if len(rows) and not float(rows.abs().max()) < LARGEST:
                column = int(rows.abs().amax(0).argmax())
                name = schema.columns[column] if part == INPUTS and schema.columns else f"number {column}"
                raise UserError(f"{KEY}: {name} of the {part} has values beyond {LARGEST:.2g}; use a larger unit")
            total, squares = wide_sums(rows)
            sums |= {part + COUNT: torch.tensor([len(rows)]), part + SUM: total, part + SQUARE: squares}
        _SUMS[images] = sums
    return _SUMS[images]


def _rows(images: Examples, schema: Schema, part: str) -> Tensor:
    """Return the part as float32 [n, columns]: a row for each step of a sequence."""
    if part == TARGETS:
        return images.y.flatten(1)
    return images.x.flatten(0, 1) if schema.kind == SEQUENCE else images.x.flatten(1)


def check_sums(sums: Mapping[str, Tensor], schema: Schema, examples: int = 0) -> None:
    """Raise ValueError for sums that no examples have. `examples`: the most that the site can have; 0: MOST_EXAMPLES."""
    steps = {INPUTS: schema.shape[0] if schema.kind == SEQUENCE else 1, TARGETS: 1}
    counts = {part: int(sums[part + COUNT]) for part in parts_of(schema)}
    if len({counts[part] / steps[part] for part in counts}) > 1:
        raise ValueError("inputs and targets are of different numbers of examples")
    for part, count in counts.items():
        parts = sums[part + SUM], sums[part + SQUARE]
        if count < 1 or count % steps[part]:
            raise ValueError(f"'{part + COUNT}' must be the number of examples")
        if count > (examples or MOST_EXAMPLES) * steps[part]:
            raise ValueError(f"'{part + COUNT}' is more than the site's {examples or MOST_EXAMPLES} examples")
        most = min(count << BITS, 2**63 - 1)
        for numbers in parts:
            if bool((numbers[:-1] < 0).any()) or bool((numbers[:-1] >= 2**BITS).any()):
                raise ValueError(f"'{part}' has digits out of range")
            if bool((numbers[-1] > most).any()) or bool((numbers[-1] < -most).any()):
                raise ValueError(f"'{part}' has a sum that its number of examples does not allow")
        mean_and_deviation(count, *parts)


# Mean and deviation


@dataclass(frozen=True, eq=False)
class Standardisation:
    """Mean and deviation of each input column and of each target, float64. None: that part stays as it is."""

    inputs: Pair | None = None
    targets: Pair | None = None

    @classmethod
    def from_sums(cls, sums: Mapping[str, Tensor]) -> "Standardisation":
        """Return mean and deviation of the examples that were summed. Raises ValueError without examples."""
        pairs = {part: mean_and_deviation(int(sums[part + COUNT]), sums[part + SUM], sums[part + SQUARE])
                 for part in (INPUTS, TARGETS) if part + COUNT in sums}  # fmt: skip
        return cls(pairs.get(INPUTS), pairs.get(TARGETS))

    @classmethod
    def parsed(cls, state: Mapping[str, Tensor]) -> "Standardisation":
        """Return what `state` converted. Raises UserError for other tensors."""
        parts = [part for part in (INPUTS, TARGETS) if part + MEAN in state]
        fits = {part + name for part in parts for name in (MEAN, DEVIATION)} == state.keys() and all(
            tensor.ndim == 1 and tensor.dtype == torch.float64 and bool(tensor.isfinite().all()) for tensor in state.values()
        )
        if not fits or any(bool((state[part + DEVIATION] < 0).any()) for part in parts):
            raise UserError(f"record '{STANDARDISATION}': must have a finite mean and deviation of each column")
        pairs = {part: (state[part + MEAN], state[part + DEVIATION]) for part in parts}
        return cls(pairs.get(INPUTS), pairs.get(TARGETS))

    def state(self) -> State:
        """Return the numbers as tensors by name, for a record or a file."""
        pairs = {INPUTS: self.inputs, TARGETS: self.targets}
        return {part + name: tensor for part, pair in pairs.items() if pair
                for name, tensor in zip((MEAN, DEVIATION), pair, strict=True)}  # fmt: skip

    def of_inputs(self, x: Tensor) -> Tensor:
        """Return standardised inputs, float32 of the same shape. Raises UserError for another number of columns."""
        return x if self.inputs is None else _scaled(x, self.inputs)

    def of_targets(self, y: Tensor) -> Tensor:
        """Return standardised targets, float32 [n, numbers]."""
        return y if self.targets is None else _scaled(y, self.targets)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return a network's outputs in the unit of the targets: the inverse of `of_targets`, float32."""
        if self.targets is None:
            return outputs
        mean, deviation = (_shaped(tensor, outputs) for tensor in self.targets)
        return (outputs.double() * deviation + mean).float()


def standardised(images: Examples, by: Standardisation | None) -> Examples:
    """Return examples with standardised inputs and targets; None: the same examples."""
    return images if by is None else Examples(by.of_inputs(images.x), by.of_targets(images.y))


def _scaled(numbers: Tensor, pair: Pair) -> Tensor:
    mean, deviation = (_shaped(tensor, numbers) for tensor in pair)
    scale = torch.where(deviation > 0, 1.0 / deviation, 0.0)
    return torch.cat([((rows.double() - mean) * scale).float() for rows in numbers.split(ROWS)])


def _shaped(columns: Tensor, numbers: Tensor) -> Tensor:
    """Return the columns on the device of a batch, in the shape of its examples or of their last dimension."""
    shape = numbers.shape[1:]
    if len(columns) == shape.numel():
        return columns.to(numbers.device).view(shape)
    if not shape or len(columns) != shape[-1]:
        raise UserError(f"{KEY}: has {len(columns)} means, but the examples have the shape {list(shape)}")
    return columns.to(numbers.device)
