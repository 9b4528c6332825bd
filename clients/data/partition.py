"""How the sites of one entry divide a domain: the partitioners of flwr_datasets, given labels alone, or the user's own."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.clients.data.cache import kept
from fedloom.clients.data.sources import Labels, Positions
from fedloom.conf.errors import UserError
from fedloom.conf.plugins import call, outside, parameters
from fedloom.conf.randomness import generator
from fedloom.conf.sites import PartitionConfig

VERSION = 1  # of the ways below; a new one makes kept divisions invalid


@dataclass(frozen=True)
class Scheme:
    """A way to divide. `partitioner` takes (the module, options, number of images, of parts, seed); `key`: its option."""

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
    """Disjoint positions in `labels`, int64 [n_k] ascending, for each of the `parts` sites; random by (seed, name).

    iid, size and dirichlet (arXiv 1905.12022) leave no image over; classes (arXiv 2102.02079) leaves those of a class
    that no site has drawn. Raises UserError if there are fewer than min_samples per part, or no such division.

    A function of an outside package is called as function(labels=, parts=, generator=, and partition.options); `generator`
    (NumPy's) only if it takes one. It returns the positions of each part, and may leave images over.
    """
    check_way(how)
    count = len(labels)
    if parts * how.min_samples > count:
        few = f"{count} training images for {parts} sites, fewer than partition.min_samples={how.min_samples} each"
        raise UserError(f"{few}; use fewer sites or a smaller min_samples")
    if how.name not in WAYS:
        return _by_outside(labels, parts, how, generator(seed, name, "partition"))
    facts = f"{VERSION}|{parts}|{how}|{seed}|{name}|{labels.dtype}|".encode()
    key = hashlib.sha256(facts + np.ascontiguousarray(labels).tobytes()).hexdigest()
    return kept(key, lambda: _divide(labels, parts, how, seed, name))


def check_way(how: PartitionConfig) -> None:
    """UserError for a way to divide that is nowhere, with the nearest known name, or for options that it does not take."""
    find_way(how.name)
    for name, way in WAYS.items():
        if way.key and name != how.name and getattr(how, way.key) != getattr(PartitionConfig(), way.key):
            raise UserError(f"partition.{way.key}: is of partition.name={name}, and the name is '{how.name}': "
                            f"give that name, or leave {way.key} out")  # fmt: skip
    if how.name in WAYS and how.options:
        raise UserError(f"partition.options: '{how.name}' takes none, its own stand beside its name")


def find_way(name: str) -> Any:
    """The Way of that name, or what it stands for in an outside package; UserError with the nearest known name otherwise."""
    return WAYS[name] if name in WAYS else outside("partitioner", name, WAYS, "partition.name")


def _by_outside(labels: Labels, parts: int, how: PartitionConfig, random: np.random.Generator) -> tuple[Positions, ...]:
    """What an outside package's function gives, checked. Never kept on disk: its code may change."""
    function = find_way(how.name)
    if not callable(function):
        raise UserError(f"partition.name: '{how.name}' is of the type {type(function).__name__}, takes a function")
    known, others = parameters(function)
    drawn = {"generator": random} if others or "generator" in [one.name for one in known] else {}
    given = {"labels": labels.copy(), "parts": parts, **drawn}
    made = call(function, how.options, given, how.name, "partition.options")
    if not isinstance(made, list | tuple) or len(made) != parts:
        got = f"{len(made)} parts" if isinstance(made, list | tuple) else f"a {type(made).__name__}"
        raise UserError(f"partition.name: '{how.name}' gave {got}, takes a list of positions for each of {parts} sites")
    divided = tuple(np.sort(_positions(part, len(labels), how.name)) for part in made)
    everything = np.concatenate(divided)
    if len(np.unique(everything)) < len(everything):
        raise UserError(f"partition.name: '{how.name}' gave an image to two sites, or twice to one")
    smallest = min(range(parts), key=lambda part: len(divided[part]))
    if len(divided[smallest]) < how.min_samples:
        few = f"'{how.name}' gave site {smallest} of {parts} {len(divided[smallest])} images"
        raise UserError(f"partition.name: {few}, fewer than partition.min_samples={how.min_samples}")
    return divided


def _positions(given: Any, count: int, name: str) -> Positions:
    try:
        part = np.asarray(given)
    except (ValueError, TypeError):  # lists of different lengths
        part = np.empty((0, 0))
    if part.ndim != 1 or (len(part) and (part.dtype.kind not in "iu" or not 0 <= part.min() <= part.max() < count)):
        raise UserError(f"partition.name: '{name}' gave positions that are no whole numbers from 0 to {count - 1}")
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
            why = f"no division of {count} training images among {parts} sites by {way.asked.format(**vars(how))}"
            raise UserError(f"{why}; {way.mend}") from error


def divide_alike(labels: Labels, parts: Sequence[Labels], random: np.random.Generator) -> tuple[Positions, ...]:
    """Disjoint positions in `labels`, int64 [n_k] ascending, that divide these images as `parts`, other images' labels, are.

    Of each class every part gets its share of that class's images, up to one; who gets the ones that are over is drawn such
    that a part's number of images follows its shares, too. Images of a class that no part has are left over.
    """
    known = np.unique(np.concatenate(parts))
    there = [np.flatnonzero(labels == name) for name in known]
    has = np.stack([np.bincount(np.searchsorted(known, part), minlength=len(known)) for part in parts])
    owed, given = np.zeros(len(parts)), [[] for _ in parts]
    for place, mine in enumerate(there):
        shares = len(mine) * has[:, place] / has[:, place].sum()
        whole = np.floor(shares + 1e-9).astype(np.int64)
        rest = np.maximum(shares - whole, 0.0)
        rank = np.lexsort((random.random(len(parts)), -(owed + rest), rest <= 1e-9))
        whole[rank[: len(mine) - whole.sum()]] += 1
        owed += shares - whole
        for part, drawn in zip(given, np.split(random.permutation(mine), np.cumsum(whole)[:-1]), strict=True):
            part.append(drawn)
    return tuple(np.sort(np.concatenate(part)) for part in given)


def sizes(count: int, parts: int, growth: float) -> list[int]:
    """How many of `count` images site k of `parts` gets: in proportion to (k + 1) ** growth, exact in sum, at least 1.

    Every site gets one, and its share of the others rounded down; what is left goes to the largest remainders.
    """
    weights = (np.arange(1, parts + 1) / parts) ** growth
    shares = (count - parts) * weights / weights.sum()
    whole = np.floor(shares).astype(int)
    whole[np.argsort(whole - shares, kind="stable")[: count - parts - whole.sum()]] += 1
    return (whole + 1).tolist()


def _rows(labels: Labels) -> Any:
    """A data set of labels in which selecting rows gives their positions instead of a new data set.

    The partitioners end in a selection; 10,000 new data sets would take 10 s.
    """
    from datasets import Dataset

    class Rows(Dataset):
        def select(self, indices: Any, *args: Any, **kwargs: Any) -> Any:
            return np.asarray(indices, np.int64)

    return Rows.from_dict({"label": labels})
