"""What sites with their own data report when they enrol: their number of training examples, their classes and columns."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedloom.clients.data import differing, numbers_named
from fedloom.clients.data.schema import categories_of, without_of
from fedloom.clients.protocol.messages import METRICS
from fedloom.clients.protocol.reply_checks import MOST_CLASSES, ReplyError, read_names
from fedloom.conf.errors import plain
from fedloom.server.rounds.channel import RawReply

MOST_IMAGES = 2**31 - 1
MOST_NAMED = 5  # columns in a message
FEW_COLUMNS = 100
MOST_TIMES = 10  # times the median of the other sites: a site's number is a weight, and cannot be checked


@dataclass
class ClientMetadata:
    """What the enrolled sites report. A site with an invalid report has not enrolled, and may report again."""

    _sizes: dict[str, int] = field(default_factory=dict)
    _counted: dict[str, int] = field(default_factory=dict)  # how many of these images count
    _names: dict[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)  # by the site's index
    _columns: dict[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)  # of tables, by the site's index
    _meanings: dict[str, tuple[str, ...]] = field(default_factory=dict)  # what each site's classes mean
    _faults: dict[str, str] = field(default_factory=dict)  # why a site that was asked has not enrolled

    def has(self, site: str) -> bool:
        """Return whether a site has enrolled."""
        return site in self._sizes

    def take(self, reply: RawReply, outputs: int = MOST_CLASSES, columns_stated: int = 0) -> None:
        """Enrol the site that sent this reply, or store why it cannot enrol.

        Args:
            reply: The site's reply.
            outputs: The number of the site's outputs; names of further classes are left out.
            columns_stated: The number of columns in data.form.shape; 0: not stated. A few more are compared later.
        """
        try:
            images, names, meanings, columns = _read(reply)
            if columns_stated and len(columns) > MOST_TIMES * max(FEW_COLUMNS, columns_stated):
                raise ReplyError(_odd_number(columns, columns_stated))
            names, meanings = names[:outputs], meanings[:outputs]
        except ReplyError as error:
            self._faults[reply.site.name] = str(error)
            return
        self._meanings[reply.site.name], self._counted = meanings, {}
        self._sizes[reply.site.name], self._names[reply.site.index] = images, (reply.site.name, names)
        self._columns[reply.site.index] = reply.site.name, columns

    def images(self, site: str) -> int:
        """Return how many training examples a site has. Raises ReplyError if it has not enrolled."""
        if site not in self._sizes:
            raise ReplyError(f"it did not enrol: {self._faults.get(site, 'it has not been asked yet')}")
        return self._sizes[site]

    def counted(self, site: str) -> int:
        """Return how many of a site's training examples count (`capped`). Raises ReplyError if it is not enrolled."""
        self.images(site)
        if self._counted.keys() != self._sizes.keys():
            self._counted = capped(self._sizes)
        return self._counted[site]

    def class_meanings(self) -> dict[str, tuple[str, ...]]:
        """Return, by enrolled site, what its classes stand for, also if their names are numbers; empty if unknown."""
        return dict(self._meanings)

    def class_names(self) -> dict[str, tuple[str, ...]]:
        """Return, by enrolled site, the names of its classes; empty if they are numbers."""
        return dict(self._names.values())

    def unlike(self) -> dict[str, str]:
        """Return, by site, how its class names differ from the most common ones (on a tie, the first site's), if they do."""
        return _unlike_classes(self._names)

    def unlike_columns(self, number: int = 0) -> dict[str, str]:
        """Return, by site, how its table's columns differ from the most common ones, or from their `number` (0: any)."""
        tables = {site: names for _, (site, names) in sorted(self._columns.items()) if names}
        usual, first = _usual(tables)
        hint = _hint([*tables.values()])
        return {site: reason + hint for site, names in tables.items()
                if (reason := _odd_columns(names, usual, first) or _odd_number(names, number))}  # fmt: skip


def _hint(tables: Sequence[Sequence[str]]) -> str:
    """Return how the tables get the same columns; empty if options of their domains cannot do that."""
    category, without = categories_of(tables), without_of(tables)
    parts = [f"write {plain(category)} in the domain of each site"] if category else []
    parts += [f"write {plain(without)} in the domain of each site with such a column"] if without else []
    return f"; {', '.join(parts)}, and the number of columns in data.form.shape" if parts else ""


def _usual(named: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, ...], str]:
    """Return the most common names (on a tie, the first site's), and the first site with them."""
    usual = Counter(named.values()).most_common(1)[0][0] if named else ()
    return usual, next((site for site, names in named.items() if names == usual), "")


def _odd_columns(names: Sequence[str], usual: Sequence[str], first: str) -> str:
    """Return how a table's columns differ from the usual ones, which the site `first` has; empty if they do not."""
    odd = {"lacks": [name for name in usual if name not in names], "has": [name for name in names if name not in usual]}
    if parts := [f"{verb} {plain(', '.join([*dict.fromkeys(each)][:MOST_NAMED]))}" for verb, each in odd.items() if each]:
        return f"its table {' and '.join(parts)}, unlike {first}"
    if (k := differing(usual, names)) is not None:
        return f"its column {k} is '{plain(names[k])}', but column {k} of {first} is '{plain(usual[k])}'"
    return ""


def _odd_number(names: Sequence[str], number: int) -> str:
    same = number in (0, len(names))
    return "" if same else f"its table has {len(names)} columns, but data.form.shape is [{number}]"


def _unlike_classes(names_of: Mapping[int, tuple[str, tuple[str, ...]]]) -> dict[str, str]:
    all_named = numbers_named(dict(pair for _, pair in sorted(names_of.items())))
    named = {site: names for site, names in all_named.items() if names}
    usual, first = _usual(named)
    reasons = {}
    for site, names in named.items():
        if (k := differing(usual, names)) is not None:
            reasons[site] = f"its class {k} is '{plain(names[k])}', but class {k} of {first} is '{plain(usual[k])}'"
            reasons[site] += "; write task=class behind its path if these are class numbers" if names[k].isdigit() else ""
    return reasons


def _read(reply: RawReply) -> tuple[int, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    if reply.content is None:
        raise ReplyError(reply.reason)
    images = (reply.content.metric_records.get(METRICS) or {}).get("samples")
    if not isinstance(images, int) or not 1 <= images <= MOST_IMAGES:
        raise ReplyError(f"its number of images is missing, or not from 1 to {MOST_IMAGES}")
    names, meanings, columns = (read_names(reply.content, key) for key in ("names", "things", "columns"))
    return images, names, meanings, columns


def capped(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return, by site, how many of its images count: at most MOST_TIMES the median number of the other sites."""
    ordered = sorted(sizes.values())
    return {site: min(size, int(MOST_TIMES * _median_without(ordered, size))) if len(ordered) > 1 else size
            for site, size in sizes.items()}  # fmt: skip


def _median_without(ordered: Sequence[int], size: int) -> float:
    """Return the median of ordered sizes, without one entry of this size."""
    skipped, rest = bisect_left(ordered, size), len(ordered) - 1

    def at(index: int) -> int:
        return ordered[index + (index >= skipped)]

    return (at((rest - 1) // 2) + at(rest // 2)) / 2
