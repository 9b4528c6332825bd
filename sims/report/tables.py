"""Tables of a run's results, for Markdown, HTML and the terminal."""

import html
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table as RichTable
from rich.text import Text

from fedloom.conf.sites import BEST, PERSONAL
from fedloom.server.run_folder.scores import headline, metric_of

if TYPE_CHECKING:
    import pandas

KINDS = ("csv", "md", "tex")  # of tables in files


@dataclass(frozen=True)
class Link:
    """A text with a link to another file. `target` is relative to the page's folder."""

    text: str
    target: str


Cell = str | float | Link | None
MAX_ROWS = 20
MAX_DOMAINS = 12
ARROW = " → "
_DIGEST = re.compile(r"\b([0-9a-f]{32,})\b")
_LATEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "±": r"$\pm$", "→": r"$\to$",
    "…": r"\dots{}", "<": "$<$", ">": "$>$",
}  # fmt: skip
_ONE = r"([-+]?[\d.,]+%?|-)"
_NUMBER = re.compile(rf"(\* )?{_ONE}( (→|±|to) {_ONE})*")


def file_name(title: str) -> str:
    """Return a title as a file's name: lower case, words joined by "-"."""
    return "-".join(re.findall(r"[^\W_]+", title.lower()))


def percent(fraction: float | None) -> str:
    """Return an accuracy as text: 0.914 is '91.4%'; None and NaN are '-'."""
    return "-" if fraction is None or math.isnan(fraction) else f"{100 * fraction:.1f}%"


def clean(text: str) -> str:
    """Return `text` on one line: each run of white space or unprintable characters becomes one space."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def shortened(text: str, room: int) -> str:
    """Return the text on one line, shortened in the middle to at most `room` characters."""
    text = clean(text)
    return f"{text[: room // 2]}…{text[-(room // 2 - 1) :]}" if len(text) > room else text


def show(cell: Cell) -> str:
    """Return a cell as one line of text: numbers with up to 4 significant digits."""
    if isinstance(cell, str | Link):
        return clean(cell if isinstance(cell, str) else cell.text)
    if cell is None or math.isnan(cell):
        return "-"
    return str(cell) if isinstance(cell, int) else f"{cell:.4g}"


@dataclass(frozen=True)
class Table:
    """A table with a title. Every row has one cell per column. `note` is the text below the table."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"table '{self.title}': every row takes {len(self.columns)} cells")

    def markdown(self) -> str:
        """Return the table in GitHub's Markdown, with a final line break."""
        return self._lines(f"**{_in_markdown(self.title)}**", _in_markdown)

    def plain(self) -> str:
        """Return the lines of `markdown` without escapes, for a terminal."""
        return self._lines(clean(self.title), clean)

    def frame(self) -> "pandas.DataFrame":
        """Return the table as a pandas table of texts."""
        import pandas

        rows = [[show(cell) for cell in row] for row in self.rows]
        return pandas.DataFrame(rows, columns=[clean(name) for name in self.columns])  # pyright: ignore[reportArgumentType]

    def latex(self) -> str:
        """Return the table in LaTeX, for the package booktabs, with title and note as its caption."""
        columns = "".join("l" if left else "r" for left in self._left())
        caption = _in_latex(". ".join(filter(None, [self.title, self.note])))
        text = self.frame().map(_in_latex).rename(columns=_in_latex).to_latex(index=False, column_format=columns)
        return f"\\begin{{table}}\n\\caption{{{caption}}}\n{text}\\end{{table}}\n"

    def write(self, path: Path, kinds: Iterable[str]) -> None:
        """Write the table to files of these KINDS: `path` with a dot and the kind."""
        for kind in kinds:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = {"csv": lambda: self.frame().to_csv(index=False), "md": self.markdown, "tex": self.latex}[kind]()
            path.with_name(f"{path.name}.{kind}").write_text(text, encoding="utf-8")

    def _lines(self, title: str, written: Callable[[str], str]) -> str:
        sides = [":---" if left else "---:" for left in self._left()]
        lines = [_line(map(written, self.columns)), _line(sides)]
        lines += [_line(written(show(cell)) for cell in row) for row in self.rows]
        head = [title, ""] if self.title else []
        foot = ["", written(self.note)] if self.note else []
        return "\n".join([*head, *lines, *foot]) + "\n"

    def html(self) -> str:
        """Return an escaped <table>. Cells with numbers have the class `number`, those with one word `whole`."""
        left = self._left()
        head = "".join(_in_html_cell("th", name, text) for name, text in zip(self.columns, left, strict=True))
        rows = ("".join(_in_html_cell("td", cell, text) for cell, text in zip(row, left, strict=True)) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>\n" for row in rows)
        title = f"<caption>{_in_html(self.title)}</caption>" if self.title else ""
        note = f'<p class="note">{_in_html(self.note)}</p>\n' if self.note else ""
        return f"<table>{title}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>\n{note}"

    def rich(self) -> RichTable:
        """Return a table for a rich console, which reads no cell as markup."""
        caption = Text(clean(self.note)) if self.note else None
        table = RichTable(title=Text(clean(self.title)), caption=caption, title_justify="left", caption_justify="left")
        for place, (name, left) in enumerate(zip(self.columns, self._left(), strict=True)):
            width = max((len(show(row[place])) for row in self.rows), default=0)
            head = clean(name) if left else "\n".join(textwrap.wrap(clean(name), max(width, 1), break_long_words=False))
            table.add_column(Text(head), justify="left" if left else "right", overflow="fold", no_wrap=not left)
        for row in self.rows:
            table.add_row(*(Text(show(cell)) for cell in row))
        return table

    def _left(self) -> list[bool]:
        """Return for each column whether it holds text. Columns of numbers are aligned to the right."""
        columns = range(len(self.columns))
        return [any(not _NUMBER.fullmatch(show(row[column])) for row in self.rows) for column in columns]


def cut(rows: Sequence[Sequence[Cell]], what: str) -> tuple[list[Sequence[Cell]], str]:
    """Return the first MAX_ROWS rows, and a sentence that says so if there are more. `what`: the rows' name."""
    left_out = len(rows) > MAX_ROWS
    return list(rows[:MAX_ROWS]), f"The first {MAX_ROWS} of {len(rows)} {what} are shown." if left_out else ""


def domains(summary: Mapping[str, Any]) -> list[str]:
    """Return the domains with test accuracies, in the order of the summary, without `union`."""
    found = {name: None for scores in accuracies(summary).values() for name in scores}
    return [name for name in found if name != "union"]


def only_domain(summary: Mapping[str, Any]) -> str:
    """Return the domain of all test accuracies if there is only one (it equals the union), else an empty text."""
    names = domains(summary)
    rows = [row for row in accuracies(summary).values() if "union" in row]
    return names[0] if len(names) == 1 and all(row.get(names[0]) == row["union"] for row in rows) else ""


def columns_of(summary: Mapping[str, Any]) -> list[str]:
    """Return the columns of test accuracies: the domains, and the union if there are several."""
    return domains(summary) if only_domain(summary) else [*domains(summary), "union"]


def accuracies(summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the first metric by network and domain: first the aggregate, then the baselines, then the sites' own networks.

    A method without an aggregate is listed by its mode, with the mean of its sites' networks.
    """
    scores, sites, first = dict(headline(summary)), homes(summary), aggregate(summary)
    own, mode = [scores[name] for name in scores if name in sites], str(summary.get("method")).rpartition("/")[2]
    if own and not has_aggregate(summary) and mode not in scores:
        first = mode
        scores[mode] = {key: sum(row[key] for row in own) / len(own) for key in own[0] if all(key in row for row in own)}
    return {name: scores[name] for name in sorted(scores, key=lambda name: (name != first, name in sites))}


def has_aggregate(summary: Mapping[str, Any]) -> bool:
    """Return whether the method has one network for all sites."""
    return summary.get("aggregate") != ""


def aggregate(summary: Mapping[str, Any]) -> str:
    """Return the aggregated network's name among the test accuracies; empty if it was not measured.

    In summaries without this name, it is the first network that is not a site's.
    """
    scores, sites = headline(summary), homes(summary)
    recorded = str(summary.get("aggregate"))
    if recorded in scores or not has_aggregate(summary):
        return recorded
    return next((name for name in scores if name not in sites), "")


def homes(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return each site's domain, by the site's name."""
    return {site["name"]: site["domain"] for site in summary.get("sites") or []}


def titled(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return each site's name with the value of the column that divides a table among sites, if there is one."""
    parts = {site["name"]: site.get("part") for site in summary.get("sites") or []}
    return {name: f"{name} ({part})" if part else name for name, part in parts.items()}


def before_forgetting(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the test accuracies by domain of the aggregated network, which contains all sites."""
    return accuracies(summary).get(aggregate(summary), {})


def shown(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the test accuracies by domain of the network that the run keeps: the best one, if it has one, or the last."""
    return accuracies(summary).get(BEST, {}) if summary.get(BEST) else before_forgetting(summary)


def which(summary: Mapping[str, Any]) -> str:
    """Return which network `shown` is about, "best, round 7"; empty for the last one."""
    return f"{BEST}, round {best['round']}" if (best := summary.get(BEST)) else ""


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None or NaN; None without any."""
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else None


class Holders:
    """Which sites of a run have which domain. Build it once for each summary, because there may be many sites.

    Attributes:
        home: The domain of each site, by the site's name.
    """

    def __init__(self, summary: Mapping[str, Any]) -> None:
        self.home = homes(summary)
        self._domains = domains(summary)
        self._sites: dict[str, list[str]] = {}
        for site, domain in self.home.items():
            self._sites.setdefault(domain, []).append(site)

    def others(self, site: str) -> list[str]:
        """Return the other sites with the same domain as `site`."""
        return [name for name in self._sites.get(self.home.get(site, ""), []) if name != site]

    def retained(self, site: str) -> list[str]:
        """Return the domains that remain in the federation without `site`: all, except one that only `site` has."""
        lost = None if self.others(site) else self.home.get(site)
        return [name for name in self._domains if name != lost]

    def retained_mean(self, scores: Mapping[str, float], site: str) -> float | None:
        """Return the mean accuracy on the domains that remain in the federation without `site` (see `retained`).

        Args:
            scores: The accuracy on each domain.
            site: The site to leave out.

        Returns:
            The mean; None if no remaining domain has a score.
        """
        return mean([scores.get(name) for name in self.retained(site)])


def accuracy_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of the first metric of aggregate, baselines and sites' own networks on every domain."""
    sites, columns, several = homes(summary), domains(summary), not only_domain(summary)
    first, metric, titles = columns[:MAX_DOMAINS], metric_of(summary), {**titled(summary), BEST: which(summary) or BEST}
    rows = []
    for name, scores in accuracies(summary).items():
        cells = [_marked(metric.text(scores.get(domain)), domain == sites.get(name)) for domain in first]
        rows.append([titles.get(name, name), *cells, *([metric.text(scores.get("union"))] if several else [])])
    kept, note = cut(rows, "networks")
    starred = "* the site's own domain" if sites.keys() & accuracies(summary).keys() else ""
    mark = "; ".join(filter(None, [starred, "union: test examples of all domains together" if several else ""]))
    few = f"The first {MAX_DOMAINS} of {len(columns)} domains are shown." if len(columns) > len(first) else ""
    means = "" if has_aggregate(summary) else "Methods without an aggregated network: mean over the sites' own networks."
    own = PERSONAL in accuracies(summary)
    personal = f"{PERSONAL}: the sites' own networks, each on its own site's test examples." if own else ""
    best = "best: chosen by validation examples; the other networks are those of the last round." if which(summary) else ""
    notes = " ".join(filter(None, [f"{mark}." if mark else "", means, best, personal, note, few]))
    return Table(f"Test {metric.title}", ["network", *first, *(["union"] if several else [])], kept, notes)


def at_sites_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of the mean accuracy of the networks that sites use (server.evaluation.per_client_metrics)."""
    rows = [[name, *(percent(scores.get(key)) for key in ("own", "lacking", "union"))]
            for name, scores in summary["at_sites"].items()]  # fmt: skip
    note = (
        "Means over sites, each with the shared network of its architecture, else its own. own test: the site's domain, "
        "classes as frequent as at the site; classes it lacks: classes without images at the site; all: all domains."
    )
    return Table("At the sites", ["method", "own test", "classes it lacks", "all"], rows, note)


def costs_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of each network's size, traffic and time (server.evaluation.per_client_metrics)."""
    rows = [[name, cost["sites"], cost["parameters"], _megabytes(cost.get("bytes")), f"{1e3 * cost['seconds']:.1f}"]
            for name, cost in summary["costs"].items()]  # fmt: skip
    columns = ["network", "sites", "parameters", "MB per site and round", "ms for 1,000 images"]
    return Table("Cost of the networks", columns, rows, "MB: sent and received. ms: measured on the server's machine.")


def traffic_table(metrics: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return, as a list, a table of each site's mean MB per round, both ways; no table if no round has recorded bytes."""
    rounds: dict[str, list[tuple[int, int]]] = {}
    for record in metrics:
        for site, both in (record.get("bytes") or {}).items():
            rounds.setdefault(site, []).append(both)
    rows = [[site, len(each), *(sum(pair[direction] for pair in each) / len(each) / 1e6 for direction in (0, 1))]
            for site, each in sorted(rounds.items())]  # fmt: skip
    kept, few = cut(rows, "sites")
    explanation = ("Total data exchanged per round. Identical data is counted once per site, but sent once where the engine "
            "allows it.")  # fmt: skip
    columns = ["site", "rounds", "to the site", "from the site"]
    return [Table("Traffic per round, MB", columns, kept, f"{explanation} {few}".strip())] if rows else []


def _megabytes(number: int | None) -> float | None:
    return None if number is None else round(number / 1e6, 3)


def _marked(value: str, own: bool) -> str:
    return f"* {value}" if own else value


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _in_html_cell(tag: str, cell: Cell, left: bool) -> str:
    """Return a cell as HTML. Only digests may be broken over lines."""
    text = show(cell)
    digests = left and _DIGEST.search(text)
    kind = ' class="number"' if not left else ' class="whole"' if len(text.split()) == 1 and not digests else ""
    shown = _DIGEST.sub(r'<span class="digest">\1</span>', _in_html(text)) if digests else _in_html(text)
    if isinstance(cell, Link):
        shown = f'<a href="{html.escape(cell.target)}">{shown}</a>'
    return f"<{tag}{kind}>{shown}</{tag}>"


def _in_html(text: str) -> str:
    return html.escape(clean(text))


def _in_latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in clean(text))


def _in_markdown(text: str) -> str:
    """Escape a text for Markdown. An underscore inside a word (mnist_m) needs no escape."""
    escaped = re.sub(r"([\\`*|<>&~\[\]])", r"\\\1", clean(text))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", escaped)
