"""From the keys `sites` and `population` to the roster: the named sites, in the order of the configuration."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.conf.once import once
from fedloom.conf.schema import MOST_SITES, Config, SiteConfig
from fedloom.conf.typed import build_many

METHOD_NAMES = {"sum", "star", "composed", "half", "mean", "fused"}
MODE_NAMES = {"exact", "regularised", "independent", "fedavg", "together", "sequential_ab", "sequential_ba",
              "exclusive", "alone"}  # fmt: skip
PERSONAL = "personal"  # the display name of the sites' own networks, each measured at its site
RESULT_NAMES = {"aggregate", PERSONAL} | METHOD_NAMES | MODE_NAMES  # of tables and files, beside the sites' own
UNION = "union"  # the display name of all domains together
MOST_NAME_BYTES = 100  # folders are made of a site's name


@dataclass(frozen=True)
class Site:
    """One participant. `part` of `parts`: which share of the entry's domain it trains on."""

    index: int
    name: str
    spec: SiteConfig
    part: int
    parts: int


def parse_entries(given: Any) -> list[SiteConfig]:
    """The entries of a `sites` list. Raises UserError naming the entry at fault."""
    entries = []
    for place, item in enumerate(given):
        where = f"sites[{place}]"
        if not isinstance(item, SiteConfig | Mapping):
            raise UserError(f"{where}: got {item!r}, takes a section such as {{domain: mnist}}")
        entry = item if isinstance(item, SiteConfig) else build_many(SiteConfig, item, where)
        if not entry.domain:
            raise UserError(f"{where}.domain: missing")
        if entry.label == UNION:
            raise UserError(f"{where}.label: '{UNION}' stands for all domains together; take another one")
        entries.append(entry)
    return entries


def _dealt(config: Config) -> list[SiteConfig]:
    """The population's entries with the counts that `sites` (a number) gives them; order: round robin."""
    number, entries = config.sites, parse_entries(config.population)
    if not entries:
        raise UserError("sites: a number needs `population`, the list of domains that the sites are dealt out over")
    return [
        dataclasses.replace(entry, count=len(range(i, number, len(entries)))) for i, entry in enumerate(entries[:number])
    ]


@once
def roster(config: Config) -> list[Site]:
    """All sites, in order. Raises UserError for no sites, a double name or a `sites` of another kind."""
    if isinstance(config.sites, bool) or not isinstance(config.sites, int | list):
        raise UserError(f"sites: got {config.sites!r}, takes a number or a list of sites")
    by_rule = isinstance(config.sites, int)
    if (number := config.sites if isinstance(config.sites, int) else len(config.sites)) < 1:
        raise UserError(f"sites: got {config.sites}, takes at least 1")
    _check_number(number)
    entries = _dealt(config) if by_rule else parse_entries(config.sites)
    _check_number(sum(entry.count for entry in entries))
    shares = [(entry, part) for entry in entries for part in range(entry.count)]
    if by_rule:  # in turn: first every entry's first site, then every entry's second one
        shares = [(entry, part) for part in range(entries[0].count) for entry in entries if part < entry.count]
    sites = [Site(index, _name(entry, part, index), entry, part, entry.count) for index, (entry, part) in enumerate(shares)]
    double = [name for name, times in Counter(site.name for site in sites).items() if times > 1]
    if double:
        raise UserError(f"sites: the name '{double[0]}' is given twice")
    return sites


def _check_number(sites: int) -> None:
    if sites > MOST_SITES:
        raise UserError(f"sites: got {sites} in all, takes at most {MOST_SITES}")


def _name(entry: SiteConfig, part: int, index: int) -> str:
    if not entry.name:
        return f"site-{index:04d}"
    if not all(letter.isalnum() or letter in "-_." for letter in entry.name) or entry.name.startswith("."):
        raise UserError(f"sites[{index}].name: got '{entry.name}', takes letters, digits, '-', '_' and '.'")
    if len(entry.name.encode()) > MOST_NAME_BYTES:
        raise UserError(f"sites[{index}].name: got '{entry.name[:20]}...', takes at most {MOST_NAME_BYTES} bytes")
    name = entry.name if entry.count == 1 else f"{entry.name}-{part:04d}"
    if name in RESULT_NAMES:
        raise UserError(f"sites[{index}].name: '{name}' is a row of the results; take another one")
    return name
