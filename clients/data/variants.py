"""Variants: a domain with changes to its images. A label in tables and plots stands for a variant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

from fedloom.clients.data.domains import DOMAINS, find
from fedloom.clients.data.found import short
from fedloom.clients.data.listing import held, while_same
from fedloom.clients.data.own import state_of
from fedloom.clients.data.schema import CLASS
from fedloom.conf.errors import UserError, plain
from fedloom.conf.schema import Config
from fedloom.conf.sites import UNION, Site, SiteConfig

MOST_SHOWN = 5  # classes in a message


@dataclass(frozen=True)
class Variant:
    """A domain and the changes to its images. Hashable, unlike the SiteConfig it comes from.

    Attributes:
        domain: The domain's name.
        rotation: The angle in degrees, counter-clockwise.
        invert: Whether pixels are inverted.
        classes: The classes to use, in ascending order; empty: all.
        relabel: Whether these classes are numbered from 0.
    """

    domain: str
    rotation: float
    invert: bool
    classes: tuple[int, ...]
    relabel: bool

    @property
    def name(self) -> str:
        """The domain and its changes, such as mnist_r45 or cifar10_c0-1-2."""
        suffixes = [
            f"_r{self.rotation:g}" if self.rotation else "",
            "_inverted" if self.invert else "",
            "_c" + "-".join(map(str, self.classes)) if self.classes else "",
        ]
        return short(self.domain) + "".join(suffixes)


def variant(spec: SiteConfig) -> Variant:
    """Return the variant that a site's configuration `spec` sets. Flips are not part of it: they belong to training."""
    return Variant(spec.domain, spec.rotation, spec.invert, tuple(sorted(set(spec.classes))), spec.relabel)


def label(spec: SiteConfig) -> str:
    """Return the variant's name in tables and plots: spec.label, else the domain and its changes."""
    return spec.label or variant(spec).name


@while_same(lambda config: None)
def domain_specs(config: Config) -> Mapping[str, SiteConfig]:
    """Return, by label of a variant, the configuration of the first site that has it, in the order of the roster.

    Raises UserError if a label would stand for two variants.
    """
    specs: dict[str, SiteConfig] = {}
    known: set[tuple[str, Variant]] = set()
    for site in config.roster:
        key = site.spec.label, variant(site.spec)
        if key not in known:
            known.add(key)
            _add(specs, site)
    return specs


def _add(specs: dict[str, SiteConfig], site: Site) -> None:
    """Add the site's variant to `specs`, by its label."""
    name = label(site.spec)
    if name == UNION:
        raise UserError(
            f"{site.name}: its domain's label '{UNION}' is reserved for all domains together. Choose another label."
        )
    first = specs.setdefault(name, site.spec)
    if variant(first) != variant(site.spec):
        same = variant(first).name == variant(site.spec).name
        both = " and ".join(spec.domain if same else variant(spec).name for spec in (first, site.spec))
        raise UserError(f"{site.name}: the label '{name}' stands for {both}. Set a different label for each.")


def class_count(spec: SiteConfig) -> int:
    """Return the number of classes of a site's labels, which are 0 to class_count - 1.

    A subset of classes retains its domain's numbers unless `relabel` is true. Raises UserError for an unknown domain.
    """
    classes = variant(spec).classes
    return len(classes) if classes and spec.relabel else find(spec.domain).classes


def class_names(spec: SiteConfig) -> tuple[str, ...]:
    """Return the names of the classes, such as the folders of `images:PATH`; empty if they are numbers."""
    return _of_classes(spec, find(spec.domain).names)


def column_names(spec: SiteConfig) -> tuple[str, ...]:
    """Return the names of the features of a table; empty for other domains."""
    return find(spec.domain).schema.columns


def class_meanings(spec: SiteConfig) -> tuple[str, ...]:
    """Return what a site's class numbers stand for: the names of its classes, or the meanings known for a shipped data set.

    Empty if unknown.
    """
    domain = find(spec.domain)
    return _of_classes(spec, domain.names or domain.meanings)


def _of_classes(spec: SiteConfig, names: tuple[str, ...]) -> tuple[str, ...]:
    classes = variant(spec).classes
    return tuple(names[number] for number in classes if number < len(names)) if classes and spec.relabel else names


def differing(names: Sequence[str], others: Sequence[str]) -> int | None:
    """Return the first class number at which two lists of class names differ, or None. Compares the common length."""
    return next((k for k, (name, other_name) in enumerate(zip(names, others, strict=False)) if name != other_name), None)


def numbers_named(named: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return class names, where classes without names have their numbers as names if others' names are numbers, too."""
    with_gaps = [names for names in named.values() if names and all(map(str.isdigit, names))]
    numbers = tuple(map(str, range(max(map(len, with_gaps), default=0))))
    return {name: names or numbers for name, names in named.items()}


@held()
def check_shared(config: Config) -> None:
    """Raise UserError if domains that share data.classes outputs have more classes than that, or different class names."""
    if config.data.heads != "shared" or not config.data.classes:
        return  # the domains themselves determine the number of outputs
    specs = domain_specs(config)
    for name, spec in specs.items():
        if (needed := _highest(spec) + 1) > config.data.classes:
            fault = f"got {config.data.classes}, but {name} has {needed} classes"
            raise UserError(f"data.classes: {fault}. Set at least {needed}, or 0 for as many as the domains have.")
    _check_names(specs)


def _highest(spec: SiteConfig) -> int:
    """Return the highest class number of a site's images."""
    classes = variant(spec).classes
    return max(classes) if classes and not spec.relabel else class_count(spec) - 1


def _check_names(specs: Mapping[str, SiteConfig]) -> None:
    """Raise UserError if domains that share their outputs have different names for one of them."""
    names = numbers_named({name: class_names(spec) for name, spec in specs.items()})
    for first, second in combinations(names, 2):
        if (k := differing(names[first], names[second])) is not None:
            fault = f"class {k} is '{names[first][k]}' in {first} and '{names[second][k]}' in {second}"
            numbers = ", write task=class behind the paths if they are class numbers" if names[first][k].isdigit() else ""
            raise UserError(f"data.heads: {fault}. Use the same classes in both{numbers}, or set data.heads=task or own.")


def numbers_with_names(config: Config) -> str:
    """Return a warning if classes of one domain are numbers, of another names, and both share outputs; else nothing."""
    if config.data.heads != "shared":
        return ""
    specs = {name: spec for name, spec in domain_specs(config).items() if find(spec.domain).schema.task == CLASS}
    meanings = {name: class_meanings(spec) for name, spec in specs.items()}
    numbered = [name for name, known in meanings.items() if not known]
    named = [name for name in specs if class_names(specs[name]) and not all(map(str.isdigit, class_names(specs[name])))]
    if not (numbered and named):
        return ""
    names = class_names(specs[named[0]])[:MOST_SHOWN]
    shown = ", ".join(f"{number} is '{plain(name)}'" for number, name in enumerate(names))
    what = f"the classes of {plain(numbered[0])} are numbers, those of {plain(named[0])} are names"
    return f"Warning: {what}, and both share outputs: {shown}; check that the numbers mean the same"


def num_classes(config: Config) -> int:
    """Return the number of a network's outputs. Raises UserError for an unknown domain."""
    return max(block.stop for block in _blocks(config).values())


def outputs(config: Config, spec: SiteConfig) -> slice:
    """Return which of the network's outputs a site's domain uses: all, or the block of its task (data.heads=task)."""
    if config.data.heads == "own":
        return slice(0, class_count(spec))
    return _blocks(config)[label(spec)]


def _states(config: Config) -> tuple[str, ...]:
    """Return digests of the domains' files; empty if the number of outputs does not depend on them."""
    if config.data.heads != "task" and config.data.classes:
        return ()
    return tuple(state_of(domain) for domain in config.domains if domain not in DOMAINS)


@while_same(_states)
@held()
def _blocks(config: Config) -> dict[str, slice]:
    specs = domain_specs(config)
    if config.data.heads != "task" and config.data.classes:
        return dict.fromkeys(specs, slice(0, config.data.classes))
    counts = {name: class_count(spec) for name, spec in specs.items()}
    if config.data.heads != "task":
        _check_names(specs)
        return dict.fromkeys(counts, slice(0, max(counts.values())))
    ends = list(accumulate(counts.values()))
    return {name: slice(end - counts[name], end) for name, end in zip(counts, ends, strict=True)}
