"""The images of each site for training, and of each variant for validation and test."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import starmap
from urllib.parse import quote

import numpy as np
import torch

from fedloom.clients.data.blank_images import check_not_blank
from fedloom.clients.data.cache import ExampleCache
from fedloom.clients.data.domains import Place, find, locate
from fedloom.clients.data.examples import Examples
from fedloom.clients.data.form import IMAGE
from fedloom.clients.data.forms import check_forms, image_size
from fedloom.clients.data.found import short
from fedloom.clients.data.listing import held, once, while_same
from fedloom.clients.data.own import Own, OwnSplit, check_files, left_out, notes
from fedloom.clients.data.partition import COLUMN, check_way, divide, divide_alike, divide_by
from fedloom.clients.data.schema import CLASS, WORD
from fedloom.clients.data.sources import Labels, Positions
from fedloom.clients.data.splits import Selection, Split, at_most, labels, of_classes, split, strata
from fedloom.clients.data.transforms import Change, render
from fedloom.clients.data.variants import Variant, check_shared, label, numbers_with_names, variant
from fedloom.conf.errors import UserError, plain
from fedloom.conf.randomness import generator, torch_generator
from fedloom.conf.schema import Config, DataConfig
from fedloom.conf.sites import PartitionConfig, Site, SiteConfig

MOST_NAMED = 5  # classes in a message
CACHE = ExampleCache(limit=512 * 2**20)


@dataclass(frozen=True)
class _Pool:
    """The training examples that the sites of an entry share out; hashable."""

    place: Place
    variant: Variant
    parts: int
    partition: PartitionConfig
    seed: int
    validation: float
    validation_limit: int
    total: int

    def split(self) -> Split:
        return split(self.place, self.seed, self.validation, self.validation_limit)


@held()
def site_examples(config: Config, site: Site) -> Examples:
    """Return the site's training examples: images [n, c, h, w], or inputs of another kind, with their targets.

    They are its part of the domain's training examples, or `samples` of them drawn by (seed, site name).
    Raises UserError as site_sizes does.
    """
    pool, part, size = _share(config, site)
    key = (pool, str(config.data.size), config.data.grey, config.data.white, site.name, site.part, size)
    return CACHE.get(key, lambda: _images(pool.place, _drawn(config, site, part, size), pool.variant, config.data))


@held()
def class_counts(config: Config, site: Site) -> dict[int, int]:
    """Return the number of the site's training examples by class, without classes that it lacks. Reads only labels.

    Empty for targets that are not classes.
    """
    pool, part, size = _share(config, site)
    if pool.place.schema.task != CLASS:
        return {}
    y = _relabelled(labels(pool.place, _drawn(config, site, part, size)), pool.variant)
    return {int(name): int(count) for name, count in zip(*np.unique(y, return_counts=True), strict=True)}


def _drawn(config: Config, site: Site, part: Selection, size: int) -> Selection:
    """Return the images that the site takes from its part."""
    if size == len(part):
        return part
    return part.at(generator(config.seed, site.name, "samples").choice(len(part), size, replace=False))


def _states(config: Config) -> tuple[str, ...]:
    """Return digests of the files that the sites' images come from."""
    return tuple(locate(domain, config.data).state for domain in config.domains)


@while_same(_states)
@held()
def site_sizes(config: Config) -> list[int]:
    """Return the number of training examples of each site, in the order of the roster.

    Reads labels, and checks that image files are intact. Raises UserError, naming the site and option, for a domain that is
    unknown, missing or damaged, for classes that it lacks, and for a division that is impossible.
    """
    check_shared(config)
    check_forms(config)
    for domain in config.domains:
        check_files(domain)
    sizes = [_share(config, site)[2] for site in config.roster]
    for domain in config.domains:
        check_not_blank(locate(domain, config.data), config.data.white)
    return sizes


@held()
def remarks(config: Config) -> list[str]:
    """Return warnings about the domains: unread files, images of a single colour, odd classes, features of little use."""
    found = [(left_out(domain), check_not_blank(place := locate(domain, config.data), config.data.white),
              _one_class(domain, place), _only_tested(domain, place),
              *(notes(domain) if isinstance(place.source, Own) else ()))
             for domain in config.domains]  # fmt: skip
    divided = {(site.spec.domain, site.spec.partition.column): None for site in config.roster if site.parts > 1}
    several = (numbers_with_names(config), *starmap(_disclosed, divided))
    return [*(line for lines in found for line in lines if line), *filter(None, several)]


def _one_class(domain: str, place: Place) -> str:
    """Return a warning if all labels of a user's training examples are the same."""
    if not isinstance(place.source, Own) or place.schema.task != CLASS:
        return ""
    labels = place.labels(part := place.source.parts[0])
    if len(labels) < 2 or (labels != labels[0]).any():
        return ""
    name, where = _class_text(domain, labels[0]), f"domain '{short(domain)}': all {len(labels)} examples of part '{part}'"
    return f"Warning: {where} have the same label ({name}); check the labels"


def _only_tested(domain: str, place: Place) -> str:
    """Return a warning if a user's test part has classes that the training part lacks."""
    if not isinstance(place.source, OwnSplit) or place.schema.task != CLASS:
        return ""
    lacking = np.setdiff1d(place.labels("test"), place.labels("train"))
    if not len(lacking):
        return ""
    few = ", ".join(_class_text(domain, number) for number in lacking[:MOST_NAMED])
    more = f" and {len(lacking) - MOST_NAMED} more" if len(lacking) > MOST_NAMED else ""
    examples = f"test examples of {few}{more}, but no training examples"
    return f"Warning: domain '{short(domain)}': has {examples}; check the labels"


def _class_text(domain: str, number: int) -> str:
    called = (known := find(domain)).names or known.meanings
    return f"class '{plain(called[number])}'" if called else f"class {number}"


def _disclosed(domain: str, column: str) -> str:
    """Return a warning if the column that divides a table among sites is also a feature."""
    if not column or not any(name == column or name.startswith(f"{column}=") for name in find(domain).schema.columns):
        return ""
    leak = f"the column '{plain(column)}' divides the sites, and is also a feature, which discloses the site"
    return f"domain '{short(domain)}': {leak}; write without={quote(column)} behind the path to leave it out"


@held()
def site_size(config: Config, site: Site) -> int:
    """Return the number of one site's training examples. Raises UserError as site_sizes does."""
    return _share(config, site)[2]


@held()
def value_of(config: Config, site: Site) -> str:
    """Return "COLUMN=VALUE" for a site that has the rows of a table with this value (partition.name=column), else ""."""
    pool = _share(config, site)[0]
    if pool.partition.name != COLUMN or pool.parts == 1:
        return ""
    values = np.unique(pool.place.column(pool.split().train.part, pool.partition.column))
    return f"{pool.partition.column}={values[site.part]}"


@held()
def validation_images(config: Config, spec: SiteConfig) -> Examples:
    """Return the validation examples of the variant in `spec`. No site of its domain trains on them.

    n is 0 if data.validation is 0, or if a small validation part has none of the variant's classes.
    """
    place = locate(spec.domain, config.data)
    selection = split(place, config.seed, config.data.validation, config.data.validation_limit).validation
    return _watched(config, place, spec, "validation", selection, limit=0)


@held()
def test_images(config: Config, spec: SiteConfig) -> Examples:
    """Return the test examples of the variant in `spec`; at most data.test_limit, random ones."""
    place = locate(spec.domain, config.data)
    selection = split(place, config.seed, config.data.validation, config.data.validation_limit).test
    return _watched(config, place, spec, "test", selection, config.data.test_limit)


@held()
def own_examples(config: Config, site: Site, split: str) -> Examples:
    """Return the site's part of its variant's validation or test examples, in random order.

    Test examples are divided in the same proportions as training examples: of each class, a site has the same share of both,
    up to one image. Classes that no site trains on are omitted. Validation examples are divided at random, as are test
    examples of an iid entry. The parts of an entry's sites are disjoint.

    `split`: validation or test.
    """
    images = {"validation": validation_images, "test": test_images}[split](config, site.spec)
    order = torch.randperm(len(images), generator=torch_generator(config.seed, label(site.spec), split, "order"))
    if split == "test" and site.parts > 1 and site.spec.partition.name != "iid":
        pool, _, _ = _share(config, site)
        own = order[torch.isin(order, torch.from_numpy(_test_parts(pool, config.data.test_limit)[site.part]))]
    else:
        own = order[site.part :: site.parts]
    return Examples(images.x[own], images.y[own])


test_images.__test__ = False  # type: ignore[attr-defined]  # not a test of pytest


def _watched(config: Config, place: Place, spec: SiteConfig, use: str, selection: Selection, limit: int) -> Examples:
    key = (use, place, variant(spec), str(config.data), config.seed)

    def make() -> Examples:
        chosen = _chosen(place, selection, variant(spec), limit, config.seed)
        return _images(place, chosen, variant(spec), config.data)

    return CACHE.get(key, make)


def _chosen(place: Place, selection: Selection, change: Variant, limit: int, seed: int) -> Selection:
    return at_most(place, of_classes(place, selection, change.classes), limit, seed)


def _images(place: Place, chosen: Selection, change: Variant, data: DataConfig) -> Examples:
    y = labels(place, chosen)
    check_not_blank(place, data.white)
    inputs = place.images(chosen.part, chosen.index)
    if place.schema.kind == IMAGE:
        size, levels = image_size(data), place.schema.levels
        how = Change(size, data.grey, change.rotation, change.invert, levels, data.white or WORD)
        return Examples(render(inputs, how), torch.from_numpy(_relabelled(y, change)))
    return Examples(torch.from_numpy(np.array(inputs)), torch.from_numpy(np.array(y)))


def _relabelled(y: Labels, change: Variant) -> Labels:
    return np.searchsorted(change.classes, y) if change.relabel and change.classes else y


def _share(config: Config, site: Site) -> tuple[_Pool, Selection, int]:
    """Return the pool of the site's entry, the site's part, and how many images of the part it takes."""
    key = "share", id(config), id(site)  # the stored value holds both, so that no other object gets these ids
    return once(key, lambda: (config, site, _shared_out(config, site)))[2]


def _shared_out(config: Config, site: Site) -> tuple[_Pool, Selection, int]:
    data, spec = config.data, site.spec
    pool = _Pool(
        place=locate(spec.domain, data),
        variant=variant(spec),
        parts=site.parts,
        partition=spec.partition,
        seed=config.seed,
        validation=data.validation,
        validation_limit=data.validation_limit,
        total=spec.total,
    )
    try:
        check_way(spec.partition)
        part = _parts(pool)[site.part]
        return pool, part, _size(spec, len(part))
    except UserError as error:
        raise UserError(f"{site.name} ({label(spec)}): {error}") from error


def _size(spec: SiteConfig, available: int) -> int:
    if spec.samples > available:
        raise UserError(
            f"samples={spec.samples}, but there are {available} training examples; set samples to at most {available}"
        )
    size = spec.samples or available
    if size < spec.partition.min_samples:
        short = f"{size} training examples are fewer than partition.min_samples={spec.partition.min_samples}"
        raise UserError(f"{short}; use fewer sites, more samples or a smaller min_samples")
    return size


@lru_cache(maxsize=512)
def _parts(pool: _Pool) -> tuple[Selection, ...]:
    """Return each site's part of the entry's training examples."""
    train = of_classes(pool.place, pool.split().train, pool.variant.classes)
    if pool.total > len(train):
        raise UserError(
            f"total={pool.total}, but there are {len(train)} training examples; set total to at most {len(train)}"
        )
    train = at_most(pool.place, train, pool.total, pool.seed)
    if pool.partition.name == COLUMN:
        values = pool.place.column(train.part, pool.partition.column)
        return tuple(train.at(mine) for mine in divide_by(values, train.index, pool.parts, pool.partition))
    if pool.parts == 1:
        return (train,)
    positions: tuple[Positions, ...] = divide(
        strata(pool.place, train), pool.parts, pool.partition, pool.seed, pool.variant.name
    )
    return tuple(train.at(mine) for mine in positions)


@lru_cache(maxsize=64)
def _test_parts(pool: _Pool, limit: int) -> tuple[Positions, ...]:
    """Return the positions of each site's test examples among the variant's test examples."""
    chosen = _chosen(pool.place, pool.split().test, pool.variant, limit, pool.seed)
    if pool.partition.name == COLUMN:
        return divide_by(pool.place.column(chosen.part, pool.partition.column), chosen.index, pool.parts, pool.partition, 0)
    parts = [strata(pool.place, part) for part in _parts(pool)]
    return divide_alike(strata(pool.place, chosen), parts, generator(pool.seed, pool.variant.name, "test parts"))
