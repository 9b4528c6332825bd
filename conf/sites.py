"""The configuration of sites, and the roster: the list of all named sites."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from fedloom.conf.errors import UserError
from fedloom.conf.typed import build_many, option

MOST_SITES = 1_000_000
METHOD_NAMES = {"sum", "star", "composed", "half", "mean", "fused"}
MODE_NAMES = {"exact", "regularised", "independent", "fedavg", "together", "sequential_ab", "sequential_ba",
              "exclusive", "alone"}  # fmt: skip
PERSONAL = "personal"  # the display name of the sites' own networks, each measured at its site
BEST = "best"  # the display name of the network that was best on validation examples (evaluation.keep)
RESULT_NAMES = {"aggregate", PERSONAL, BEST} | METHOD_NAMES | MODE_NAMES  # rows of tables and files that are not sites
UNION = "union"  # the display name of all domains together
MOST_NAME_BYTES = 100  # a site's name is also a folder name


@dataclass(frozen=True)
class PartitionConfig:
    """How the sites of one entry in the `sites` list divide the training examples of their domain."""

    name: str = option("iid", "iid, dirichlet, classes, size, column, an entry point of a package, or module:attribute")
    alpha: float = option(0.5, "dirichlet: concentration; a smaller value is more unequal", low=1e-3)
    classes_per_site: int = option(2, "classes: number of classes at each site", low=1)
    growth: float = option(1.0, "size: site k gets a share proportional to (k + 1) ** growth", low=0.0)
    column: str = option(
        "", "column: the table's column whose values divide the examples, one site for each value", implies="column"
    )
    min_samples: int = option(10, "minimum of training examples per site", low=1)
    options: dict[str, Any] = option({}, "options of a partition from a package or module")


@dataclass(frozen=True)
class SiteConfig:
    """A site, or several equal sites: domain, transformation of its images, number of examples."""

    domain: str = option(
        "",
        "a domain's name (`fedloom doctor` lists them), images:PATH, npz:PATH, dataset:PATH, table:PATH?target=COLUMN or "
        "module:function",
    )
    label: str = option("", "name of this domain in tables; empty: made from the domain and its transformation")
    name: str = option("", "the site's name; empty: site-0000, site-0001, ... in order")
    count: int = option(1, "number of sites that share this domain; `partition` divides it", low=1, high=MOST_SITES)
    samples: int = option(0, "training examples of each of the `count` sites; 0: all examples of the site's part", low=0)
    total: int = option(0, "training examples of all the `count` sites together, before `partition`; 0: all", low=0)
    rotation: float = option(0.0, "rotation of images in degrees, counter-clockwise", low=-360.0, high=360.0)
    invert: bool = option(False, "invert images: black becomes white")
    flip: bool = option(False, "random horizontal flips in training")
    classes: list[int] = option([], "use only these classes; empty: all", low=0)
    relabel: bool = option(False, "renumber the classes from 0, in ascending order")
    network: dict[str, Any] = option(
        {}, "the site's own network: name and options; empty: the configuration's `network`", named=True
    )
    networks: list[dict[str, Any]] = option(
        [], "networks of the entry's sites, assigned in turn; instead of `network`", named=True
    )
    partition: PartitionConfig = option(PartitionConfig, "how this entry's sites divide the domain")


@dataclass(frozen=True)
class Site:
    """One named site. It trains on part `part` (from 0) of the `parts` parts of its domain; `spec` is its entry."""

    index: int
    name: str
    spec: SiteConfig
    part: int
    parts: int


def parse_entries(given: Any) -> list[SiteConfig]:
    """Return the entries of a `sites` list as SiteConfigs. Raise UserError with the wrong entry's index."""
    entries: list[SiteConfig] = []
    for index, item in enumerate(given):
        where = f"sites[{index}]"
        if not isinstance(item, SiteConfig | Mapping):
            raise UserError(f"{where}: got {item!r}, takes a section such as {{domain: mnist}}")
        entry = item if isinstance(item, SiteConfig) else build_many(SiteConfig, cast("Mapping[str, Any]", item), where)
        if not entry.domain:
            raise UserError(f"{where}.domain: missing")
        if entry.label == UNION:
            raise UserError(f"{where}.label: '{UNION}' is reserved for all domains together; use another label")
        entries.append(entry)
    return entries


def _dealt(number: int, population: list[SiteConfig]) -> list[SiteConfig]:
    """Return the population's entries with the counts for `number` sites, assigned in turn."""
    entries = parse_entries(population)
    if not entries:
        raise UserError("sites: a number needs `population`, the list of domains for these sites")
    return [
        dataclasses.replace(entry, count=len(range(i, number, len(entries)))) for i, entry in enumerate(entries[:number])
    ]


def roster(given: Any, population: list[SiteConfig]) -> list[Site]:
    """Return all sites of the keys `sites` (`given`) and `population`, in order. Raise UserError for wrong values."""
    if isinstance(given, bool) or not isinstance(given, int | list):
        raise UserError(f"sites: got {given!r}, takes a number or a list of sites")
    by_rule = isinstance(given, int)
    if (number := given if isinstance(given, int) else len(cast("list[Any]", given))) < 1:
        raise UserError(f"sites: got {given}, takes at least 1")
    _check_number(number)
    entries = _dealt(given, population) if isinstance(given, int) else parse_entries(given)
    _check_number(sum(entry.count for entry in entries))
    shares = [(entry, part) for entry in entries for part in range(entry.count)]
    if by_rule:  # in turn: first every entry's first site, then every entry's second one
        shares = [(entry, part) for part in range(entries[0].count) for entry in entries if part < entry.count]
    sites = [Site(index, _name(entry, part, index), entry, part, entry.count) for index, (entry, part) in enumerate(shares)]
    double = [name for name, times in Counter(site.name for site in sites).items() if times > 1]
    if double:
        raise UserError(f"sites: two sites have the name '{double[0]}'; rename one")
    return sites


def _check_number(sites: int) -> None:
    if sites > MOST_SITES:
        raise UserError(f"sites: got {sites} in all, takes at most {MOST_SITES}")


def is_site_name(text: str) -> bool:
    """Return whether a text can be the name of a site: it becomes the name of a folder."""
    return all(letter.isalnum() or letter in "-_." for letter in text) and not text.startswith(".")


def _name(entry: SiteConfig, part: int, index: int) -> str:
    if not entry.name:
        return f"site-{index:04d}"
    if not is_site_name(entry.name):
        raise UserError(f"sites[{index}].name: got '{entry.name}', takes letters, digits, '-', '_' and '.'")
    if len(entry.name.encode()) > MOST_NAME_BYTES:
        raise UserError(f"sites[{index}].name: got '{entry.name[:20]}...', takes at most {MOST_NAME_BYTES} bytes")
    name = entry.name if entry.count == 1 else f"{entry.name}-{part:04d}"
    if name in RESULT_NAMES:
        raise UserError(f"sites[{index}].name: '{name}' is a row of the results; use another name")
    return name
