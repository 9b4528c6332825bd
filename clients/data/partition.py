"""The division of a domain among the sites of an entry, by flwr_datasets' partitioners or a user's function."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.clients.data.cache import cached
from fedloom.clients.data.sources import Labels, Positions
from fedloom.conf.errors import UserError
from fedloom.conf.plugins import call, outside, parameters
from fedloom.conf.randomness import generator
from fedloom.conf.sites import PartitionConfig

COLUMN = "column"  # partition.name: by the values of a table's column
VERSION = 1  # version of the partitioners below; a new one makes cached divisions invalid


@dataclass(frozen=True)
class Scheme:
    """A way to divide a domain. `key`: the option that only it has. `asked`, `mend`: its name and a remedy, for errors.

    `partitioner` makes the partitioner from (flwr_datasets' module, options, number of images, number of parts, seed).
    """

    partitioner: Callable[[Any, PartitionConfig, int, int, int], Any]
    asked: str
    mend: str
    key: str = ""


WAYS = {
    "iid": Scheme(lambda module, how, count, parts, seed: module.IidPartitioner(parts), "iid", "use fewer sites"),
    "dirichlet": Scheme(
        lambda module, how, count, parts, seed: module.DirichletPartitioner(
            parts, "label", how.alpha, how.min_samples, self_balancing=False, seed=seed
        ),
        "dirichlet with partition.alpha={alpha:g} and partition.min_samples={min_samples}",
        "use fewer sites, a larger alpha or a smaller min_samples",
        "alpha",
    ),
    "classes": Scheme(
        lambda module, how, count, parts, seed: module.PathologicalPartitioner(
            parts, "label", how.classes_per_site, "first-deterministic", seed=seed
        ),
        "classes with partition.classes_per_site={classes_per_site}",
        "use fewer sites or fewer classes_per_site",
        "classes_per_site",
    ),
    "size": Scheme(
        lambda module, how, count, parts, seed: module.SizePartitioner(sizes(count, parts, how.growth)),
        "size with partition.growth={growth:g}",
        "use fewer sites or a smaller growth",
        "growth",
    ),
}


def divide(labels: Labels, parts: int, how: PartitionConfig, seed: int, name: str) -> tuple[Positions, ...]:
    """Divide images among `parts` sites, seeded by (seed, name). Returns each site's positions in `labels`, int64 ascending.

    iid, size and dirichlet (arXiv 1905.12022) use every image. classes (arXiv 2102.02079) omits the images of classes that
    no site has drawn. A user's function is called as function(labels=, parts=, **partition.options), with NumPy's
    generator= if it takes one. It returns the positions of each part, and may omit images.

    Raises UserError if a part would have fewer than partition.min_samples images, or if the division is impossible.
    """
    check_way(how)
    count = len(labels)
    if parts * how.min_samples > count:
        few = f"{count} training examples for {parts} sites are fewer than partition.min_samples={how.min_samples} each"
        raise UserError(f"{few}; use fewer sites or a smaller min_samples")
    if how.name not in WAYS:
        return _by_outside(labels, parts, how, generator(seed, name, "partition"))
    facts = f"{VERSION}|{parts}|{how}|{seed}|{name}|{labels.dtype}|".encode()
    key = hashlib.sha256(facts + np.ascontiguousarray(labels).tobytes()).hexdigest()
    return cached(key, lambda: _divide(labels, parts, how, seed, name))


def check_way(how: PartitionConfig) -> None:
    """Raise UserError for an unknown partition.name, or for options that this way of division does not take."""
    find_way(how.name)
    if (how.name == COLUMN) != bool(how.column):
        raise UserError(f"partition.column: name=column divides by the column of this name; got name={how.name} and column="
                        f"'{how.column}'. Set both, or neither.")  # fmt: skip
    for name, way in WAYS.items():
        if way.key and name != how.name and getattr(how, way.key) != getattr(PartitionConfig(), way.key):
            raise UserError(f"partition.{way.key}: belongs to partition.name={name}, but the name is '{how.name}'. "
                            f"Set partition.name={name}, or remove {way.key}.")  # fmt: skip
    if how.name in (*WAYS, COLUMN) and how.options:
        raise UserError(f"partition.options: are only for a function of your own. Set the options of '{how.name}' in the "
                        "section partition itself.")  # fmt: skip


def find_way(name: str) -> Any:
    """Return the Scheme of this name, or the user's function. Raises UserError for an unknown name."""
    known = {**WAYS, COLUMN: divide_by}
    return known[name] if name in known else outside("partitioner", name, known, "partition.name")


def _by_outside(labels: Labels, parts: int, how: PartitionConfig, random: np.random.Generator) -> tuple[Positions, ...]:
    """Call a user's function and check the result. It is never cached on disk, since the function may change."""
    function = find_way(how.name)
    if not callable(function):
        raise UserError(f"partition.name: '{how.name}' has the type {type(function).__name__}; it must be a function")
    known, others = parameters(function)
    drawn = {"generator": random} if others or "generator" in [parameter.name for parameter in known] else {}
    arguments = {"labels": labels.copy(), "parts": parts, **drawn}
    made = call(function, how.options, arguments, how.name, "partition.options")
    if not isinstance(made, list | tuple) or len(made) != parts:
        got = f"{len(made)} parts" if isinstance(made, list | tuple) else f"a {type(made).__name__}"
        raise UserError(f"partition.name: '{how.name}' returned {got}, takes a list of positions for each of {parts} sites")
    divided = tuple(np.sort(_positions(part, len(labels), how.name)) for part in made)
    everything = np.concatenate(divided)
    if len(np.unique(everything)) < len(everything):
        raise UserError(f"partition.name: '{how.name}' assigned an image twice, to two sites or to one")
    smallest = min(range(parts), key=lambda part: len(divided[part]))
    if len(divided[smallest]) < how.min_samples:
        few = f"'{how.name}' assigned {len(divided[smallest])} images to site {smallest} of {parts}"
        raise UserError(f"partition.name: {few}, fewer than partition.min_samples={how.min_samples}")
    return divided


def _positions(result: Any, count: int, name: str) -> Positions:
    try:
        part = np.asarray(result)
    except (ValueError, TypeError):  # lists of different lengths
        part = np.empty((0, 0))
    if part.ndim != 1 or (len(part) and (part.dtype.kind not in "iu" or not 0 <= part.min() <= part.max() < count)):
        raise UserError(f"partition.name: '{name}' returned positions that are not whole numbers from 0 to {count - 1}")
    return part.astype(np.int64)


def _divide(labels: Labels, parts: int, how: PartitionConfig, seed: int, name: str) -> tuple[Positions, ...]:
    from flwr_datasets import partitioner

    way, count = WAYS[how.name], len(labels)
    random = generator(seed, name, "partition")
    order = random.permutation(count)
    divider = way.partitioner(partitioner, how, count, parts, int(random.integers(2**31)))
    divider.dataset = _rows(labels[order])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one for each failed attempt of the Dirichlet partitioner
        try:
            return tuple(np.sort(order[divider.load_partition(part)]) for part in range(parts))
        except ValueError as error:
            why = f"{count} training examples cannot be divided among {parts} sites by {way.asked.format(**vars(how))}"
            raise UserError(f"{why}; {way.mend}") from error


def divide_by(
    column: Labels, index: Positions, parts: int, how: PartitionConfig, fewest: int | None = None
) -> tuple[Positions, ...]:
    """Divide the examples `index` by the values of a table's column: one site for each value, in ascending order.

    Returns each site's positions in `index`. Raises UserError unless there are `parts` values, each with at least
    partition.min_samples examples (or `fewest`).
    """
    empty = int(sum(value is None or value != value for value in column.tolist()))
    if empty:
        raise UserError(f"partition.column: '{how.column}' has {empty} empty entries; fill them in, or remove these rows")
    column = column.astype(str) if column.dtype == object else column
    values = np.unique(column)
    if len(values) != parts:
        raise UserError(f"partition.column: '{how.column}' has {len(values)} values, but the entry has count={parts}; set "
                        f"count={len(values)}")  # fmt: skip
    divided = tuple(np.flatnonzero(column[index] == value) for value in values)
    least = how.min_samples if fewest is None else fewest
    for value, part in zip(values, divided, strict=True):
        if len(part) < least:
            raise UserError(f"partition.column: '{how.column}' has {len(part)} training examples with the value '{value}', "
                            f"fewer than partition.min_samples={least}")  # fmt: skip
    return divided


def divide_alike(labels: Labels, parts: Sequence[Labels], random: np.random.Generator) -> tuple[Positions, ...]:
    """Divide images as other images are already divided: `parts` has each site's labels. Returns as `divide` does.

    Every site gets its share of each class, up to one image. The remaining images are drawn so that a site's total number
    also follows its shares. Images of a class that no site has are omitted.
    """
    known = np.unique(np.concatenate(parts))
    members = [np.flatnonzero(labels == name) for name in known]
    has = np.stack([np.bincount(np.searchsorted(known, part), minlength=len(known)) for part in parts])
    owed, chosen = np.zeros(len(parts)), [[] for _ in parts]
    for index, mine in enumerate(members):
        shares = len(mine) * has[:, index] / has[:, index].sum()
        counts = np.floor(shares + 1e-9).astype(np.int64)
        rest = np.maximum(shares - counts, 0.0)
        rank = np.lexsort((random.random(len(parts)), -(owed + rest), rest <= 1e-9))
        counts[rank[: len(mine) - counts.sum()]] += 1
        owed += shares - counts
        for part, drawn in zip(chosen, np.split(random.permutation(mine), np.cumsum(counts)[:-1]), strict=True):
            part.append(drawn)
    return tuple(np.sort(np.concatenate(part)) for part in chosen)


def sizes(count: int, parts: int, growth: float) -> list[int]:
    """Return how many of `count` images each of `parts` sites gets: site k in proportion to (k + 1) ** growth, at least 1.

    Every site gets one image and its share of the others, rounded down. The rest goes to the largest remainders.
    """
    weights = (np.arange(1, parts + 1) / parts) ** growth
    shares = (count - parts) * weights / weights.sum()
    counts = np.floor(shares).astype(int)
    counts[np.argsort(counts - shares, kind="stable")[: count - parts - counts.sum()]] += 1
    return (counts + 1).tolist()


def _rows(labels: Labels) -> Any:
    """Return a data set of labels whose `select` returns positions instead of a new data set.

    The partitioners end with a selection, and 10,000 new data sets would take 10 s.
    """
    from datasets import Dataset

    class Rows(Dataset):
        def select(self, indices: Any, *args: Any, **kwargs: Any) -> Any:
            return np.asarray(indices, np.int64)

    return Rows.from_dict({"label": labels})
