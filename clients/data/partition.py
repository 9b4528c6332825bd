"""How the sites of one entry divide a domain: the partitioners of flwr_datasets, given labels alone."""

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from clients.data.kept import kept
from clients.data.sources import Labels, Positions
from clients.randomness import generator
from conf.errors import UserError
from conf.schema import PartitionConfig

VERSION = 1  # of the ways below; a new one makes kept divisions invalid


@dataclass(frozen=True)
class Way:
    """A way to divide. `partitioner` takes (the module, options, number of images, of parts, seed)."""

    partitioner: Callable[[Any, PartitionConfig, int, int, int], Any]
    asked: str
    mend: str


WAYS = {
    "iid": Way(lambda module, how, count, parts, seed: module.IidPartitioner(parts), "iid", "use fewer sites"),
    "dirichlet": Way(
        lambda module, how, count, parts, seed: module.DirichletPartitioner(
            parts, "label", how.alpha, how.min_samples, self_balancing=False, seed=seed
        ),
        "dirichlet with partition.alpha={alpha:g} and partition.min_samples={min_samples}",
        "use fewer sites, a larger alpha or a smaller min_samples",
    ),
    "classes": Way(
        lambda module, how, count, parts, seed: module.PathologicalPartitioner(
            parts, "label", how.classes_per_site, "first-deterministic", seed=seed
        ),
        "classes with partition.classes_per_site={classes_per_site}",
        "use fewer sites or fewer classes_per_site",
    ),
    "size": Way(
        lambda module, how, count, parts, seed: module.SizePartitioner(sizes(count, parts, how.growth)),
        "size with partition.growth={growth:g}",
        "use fewer sites or a smaller growth",
    ),
}


def divide(labels: Labels, parts: int, how: PartitionConfig, seed: int, name: str) -> tuple[Positions, ...]:
    """Disjoint positions in `labels`, int64 [n_k] ascending, for each of the `parts` sites; random by (seed, name).

    iid, size and dirichlet (arXiv 1905.12022) leave no image over; classes (arXiv 2102.02079) leaves those of a class
    that no site has drawn. Raises UserError if there are fewer than min_samples per part, or no such division.
    """
    count = len(labels)
    if parts * how.min_samples > count:
        few = f"{count} training images for {parts} sites, fewer than partition.min_samples={how.min_samples} each"
        raise UserError(f"{few}; use fewer sites or a smaller min_samples")
    facts = f"{VERSION}|{parts}|{how}|{seed}|{name}|{labels.dtype}|".encode()
    key = hashlib.sha256(facts + np.ascontiguousarray(labels).tobytes()).hexdigest()
    return kept(key, lambda: _divide(labels, parts, how, seed, name))


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
