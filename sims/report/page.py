"""Write a self-contained HTML page: sections of paragraphs, tables, pictures and details."""

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedloom.conf.errors import UserError
from fedloom.sims.report import drawing
from fedloom.sims.report.canvas import DPI
from fedloom.sims.report.tables import Table, clean, in_html

STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd }
h1 + p { font-size: 1.1rem } .scroll { overflow-x: auto; margin: 1rem 0 }
table { border-collapse: collapse; font-size: .92rem }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem }
th, td { padding: .22rem .8rem; border-bottom: 1px solid #e4e4e4; text-align: left }
.whole { white-space: nowrap } .digest { overflow-wrap: anywhere }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
figure { margin: 1.2rem 0 } img { max-width: 100%; height: auto } figcaption, .note { color: #555; font-size: .9rem }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .85rem } summary { cursor: pointer }
th[tabindex] { cursor: pointer } th[aria-sort=ascending]::after { content: " ▲" }
th[aria-sort=descending]::after { content: " ▼" }
@media screen and (prefers-color-scheme: dark) {
body { color: #e6eaf0; background: #12161d } h2, th, td { border-color: #2d3542 } figcaption, .note { color: #a3adbb }
pre { background: #1a202a } a { color: #7db4f5 } img { background: #fff }
}
@media print {
body { font-size: 10pt; max-width: none; margin: 0 } .scroll { overflow: visible }
figure, tr { break-inside: avoid } h2, caption { break-after: avoid } thead { display: table-header-group }
}
"""
SCRIPT = """
const number = text => (value => isNaN(value) ? -Infinity : value)(parseFloat(text.replace(/[*,\\s]/g, "")));
for (const head of document.querySelectorAll("thead th")) {
  const sort = () => {
    const body = head.closest("table").tBodies[0], down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const text = row => row.cells[head.cellIndex].textContent;
    const order = head.className === "number" ? (a, b) => number(text(a)) - number(text(b))
      : (a, b) => text(a).localeCompare(text(b));
    body.append(...[...body.rows].sort((a, b) => down * order(a, b)));
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down < 0 ? "descending" : "ascending");
  };
  head.tabIndex = 0;
  head.title = "Sort by this column";
  head.addEventListener("click", sort);
  head.addEventListener("keydown", event => event.key === "Enter" && sort());
}
"""  # a page without it shows the same; the desk's policy, and that of certificates, does not run it
CSS_DPI = 96  # pixels of an inch on a page
_QUOTED, _AS_CODE = re.compile(r"`([^`]+)`"), r"<code>\1</code>"  # in paragraphs
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # nothing from elsewhere


@dataclass(frozen=True)
class Picture:
    """A PNG file and its caption. With an SVG file of the same name and named curves, pages have boxes that hide curves."""

    path: Path
    caption: str


@dataclass(frozen=True)
class Details:
    """Preformatted text that the reader can open and close."""

    title: str
    text: str


Part = str | Table | Picture | Details  # a str is a paragraph


def write_page(path: Path, title: str, sections: Sequence[tuple[str, Sequence[Part]]], sorts: bool = False) -> Path:
    """Write a self-contained HTML page from sections of (heading or empty text, parts). Return its path.

    `sorts`: a click on a table's head sorts it, by a script in the page.

    Raises UserError if a picture cannot be read or the page cannot be written.
    """
    page = page_text(title, sections, sorts)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file")
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text(page, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        reason = f"{error.strerror}; check that the folder exists and the disk has space"
        raise UserError(f"{path}: cannot be written ({reason})") from None
    return path


def page_text(title: str, sections: Sequence[tuple[str, Sequence[Part]]], sorts: bool = False) -> str:
    """Return the text of such a page."""
    body = "".join(_section(heading, parts) for heading, parts in sections)
    script_hash = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"{POLICY}; script-src 'sha256-{script_hash}'" if sorts else POLICY
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>{in_html(title)}</title>\n'
        f"<style>{STYLE}{drawing.STYLE if '<svg' in body else ''}</style></head>\n<body>\n<h1>{in_html(title)}</h1>\n{body}"
        f"{f'<script>{SCRIPT}</script>' if sorts else ''}</body>\n</html>\n"
    )


def _section(heading: str, parts: Sequence[Part]) -> str:
    return (f"<h2>{in_html(heading)}</h2>\n" if heading else "") + "".join(map(_part, parts))


def _part(part: Part) -> str:
    if isinstance(part, Table):
        return f'<div class="scroll">{part.html()}</div>\n'
    if isinstance(part, Picture):
        return _picture(part)
    if isinstance(part, Details):
        text = html.escape(_printable(part.text))
        return f"<details><summary>{in_html(part.title)}</summary><pre>{text}</pre></details>\n"
    return f"<p>{_QUOTED.sub(_AS_CODE, in_html(part))}</p>\n"


def _picture(picture: Picture) -> str:
    try:
        content = picture.path.read_bytes()
    except OSError as error:
        raise UserError(f"{picture.path}: the picture cannot be read ({error.strerror})") from None
    data = base64.b64encode(content).decode("ascii")
    caption, vectors = in_html(picture.caption), picture.path.with_suffix(".svg")
    if vectors.is_file() and (boxes := drawing.figure_with_boxes(vectors, clean(picture.caption))):
        return f"<figure>{boxes}<figcaption>{caption}</figcaption></figure>\n"
    width = int.from_bytes(content[16:20], "big") * CSS_DPI // DPI  # the header's; so texts have one size in all pictures
    image = f'<img alt="{caption}" width="{width}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>\n"


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter in "\n\t" else " " for letter in text)
