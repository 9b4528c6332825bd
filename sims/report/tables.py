"""Tables of a run's results, for Markdown, HTML and the terminal."""

import html
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table as RichTable
from rich.text import Text

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
ARROW = " → "
_DIGEST = re.compile(r"\b([0-9a-f]{32,})\b")
_LATEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "±": r"$\pm$", "→": r"$\to$",
    "…": r"\dots{}", "<": "$<$", ">": "$>$",
}  # fmt: skip
_ONE = r"([-+]?[\d.,]+%?|-)"
GAPS = {"", "-", "all"}  # in a column of numbers
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


def when(time: str) -> str:
    """Return a ledger's time stamp as the date and the time of day, in UTC; '-' for none."""
    return time[:19].replace("T", " ") or "-"


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

    def __repr__(self) -> str:
        return f"Table({clean(self.title)}: {len(self.rows)} rows)"

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
        columns = "".join("l" if left else "r" for left in self.left())
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
        sides = [":---" if left else "---:" for left in self.left()]
        lines = [_line(map(written, self.columns)), _line(sides)]
        lines += [_line(written(show(cell)) for cell in row) for row in self.rows]
        head = [title, ""] if self.title else []
        foot = ["", written(self.note)] if self.note else []
        return "\n".join([*head, *lines, *foot]) + "\n"

    def html(self) -> str:
        """Return an escaped <table>. Cells with numbers have the class `number`, those with one word `whole`."""
        left = self.left()
        head = "".join(_in_html_cell("th", name, text) for name, text in zip(self.columns, left, strict=True))
        rows = ("".join(_in_html_cell("td", cell, text) for cell, text in zip(row, left, strict=True)) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>\n" for row in rows)
        title = f"<caption>{in_html(self.title)}</caption>" if self.title else ""
        note = f'<p class="note">{in_html(self.note)}</p>\n' if self.note else ""
        return f"<table>{title}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>\n{note}"

    def rich(self) -> "Fitted":
        """Return a table for a rich console, which reads no cell as markup."""
        return Fitted(self)

    def left(self) -> list[bool]:
        """Return for each column whether it holds text. Columns of numbers, also with gaps, are aligned to the right."""
        shown = [{show(row[column]) for row in self.rows} - GAPS for column in range(len(self.columns))]
        return [bool(self.rows) and not (texts and all(map(_NUMBER.fullmatch, texts))) for texts in shown]


@dataclass(frozen=True)
class Fitted:
    """A table that fits a narrow terminal: texts are folded, or columns follow below, each time after the first column."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable]:
        least = self._widths(_pieces)
        parts, used = [[0]], least[0]
        for at in range(1, len(least)):
            if len(parts[-1]) > 1 and used + least[at] + 3 * len(parts[-1]) + 4 > options.max_width:
                parts.append([0])
                used = least[0]
            parts[-1].append(at)
            used += least[at]
        for number, part in enumerate(parts):
            title = self.table.title if number == 0 else ""
            yield self._boxes(part, self._within(part, options.max_width), title, number == len(parts) - 1)

    def _widths(self, split: Callable[[str], list[str]]) -> list[int]:
        """Return how wide columns have to be for the longest piece into which `split` splits their texts."""
        widths = []
        for name, left, *cells in zip(self.table.columns, self.table.left(), *self.table.rows, strict=True):
            texts = [*(split(clean(name)) if left else clean(name).split())]
            texts += [piece for cell in cells for piece in (split(show(cell)) if left else [show(cell)])]
            widths.append(max((cell_len(text.rstrip()) for text in texts), default=0))
        return widths

    def _within(self, part: Sequence[int], room: int) -> list[int]:
        """Return the widths of these columns, the widest of which are made narrower until all fit."""
        whole, least = self._widths(lambda text: [text]), self._widths(_pieces)
        widths = [whole[at] for at in part]
        while sum(widths) + 3 * len(widths) + 1 > room:
            at = max(range(len(widths)), key=lambda at: (widths[at] > least[part[at]], widths[at]))
            if widths[at] <= max(least[part[at]], 1):  # words are folded, too
                at = max(range(len(widths)), key=lambda at: widths[at])
            if widths[at] <= 1:
                break
            widths[at] -= 1
        return widths

    def _boxes(self, part: Sequence[int], widths: Sequence[int], title: str, last: bool) -> RichTable:
        caption = Text(clean(self.table.note)) if self.table.note and last else None
        boxes = RichTable(title=Text(clean(title)) if title else None, caption=caption, title_justify="left",
                          caption_justify="left")  # fmt: skip
        for at, width in zip(part, widths, strict=True):
            name, left = clean(self.table.columns[at]), self.table.left()[at]
            boxes.add_column(_folded(name, width), justify="left" if left else "right", overflow="fold", width=width)
        for row in self.table.rows:
            boxes.add_row(*(_folded(show(row[at]), width) for at, width in zip(part, widths, strict=True)))
        return boxes


def _folded(text: str, width: int) -> Text:
    """Return the text in lines of this width, folded at spaces and after `/` and `_`."""
    lines = [""]
    for piece in _pieces(text):
        if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return Text("\n".join(line.rstrip() for line in lines))


def _pieces(text: str) -> list[str]:
    return re.findall(r"[^/_ ]*[/_]+|[^/_ ]+ *| +", text)


def cut(rows: Sequence[Sequence[Cell]], what: str) -> tuple[list[Sequence[Cell]], str]:
    """Return the first MAX_ROWS rows, and a sentence that says so if there are more. `what`: the rows' name."""
    left_out = len(rows) > MAX_ROWS
    return list(rows[:MAX_ROWS]), f"The first {MAX_ROWS} of {len(rows)} {what} are shown." if left_out else ""


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _in_html_cell(tag: str, cell: Cell, left: bool) -> str:
    """Return a cell as HTML. Only digests may be broken over lines."""
    text = show(cell)
    digests = left and _DIGEST.search(text)
    kind = ' class="number"' if not left else ' class="whole"' if len(text.split()) == 1 and not digests else ""
    shown = _DIGEST.sub(r'<span class="digest">\1</span>', in_html(text)) if digests else in_html(text)
    if isinstance(cell, Link):
        shown = f'<a href="{html.escape(cell.target)}">{shown}</a>'
    return f"<{tag}{kind}>{shown}</{tag}>"


def in_html(text: str) -> str:
    """Return a text for HTML, on one line."""
    return html.escape(clean(text))


def _in_latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in clean(text))


def _in_markdown(text: str) -> str:
    """Escape a text for Markdown. An underscore inside a word (mnist_m) needs no escape."""
    escaped = re.sub(r"([\\`*|<>&~\[\]])", r"\\\1", clean(text))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", escaped)
