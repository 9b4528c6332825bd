"""Put a drawing with curves into an HTML page, with a box for each curve that shows or hides it."""

import re
from html import escape
from pathlib import Path
from xml.etree import ElementTree

from fedloom.sims.report.canvas import CURVE

SPACE = re.compile(r"^\{.*\}")  # in which a name is; HTML has none
MOST = 32  # curves with a box in a drawing
HIDING = "\n".join(f'figure:has([value="{n}"]:not(:checked)) .curve-{n} {{ display: none }}' for n in range(MOST))
STYLE = f"""
svg {{ max-width: 100%; height: auto }} .curves {{ border: 0; padding: 0; margin: 0 0 .4rem }}
.curves label {{ display: inline-block; max-width: 100%; margin-right: 1rem; overflow-wrap: anywhere }}
@media print {{ .curves {{ display: none }} }}
{HIDING}
"""  # of a page with such drawings


def figure_with_boxes(path: Path, caption: str) -> str:
    """Return the drawing in an SVG file as HTML, with boxes; empty if fewer than two of its parts are named curves."""
    root = ElementTree.parse(path).getroot()
    names = _named_curves(root)
    if not 1 < len(names) <= MOST:
        return ""
    _as_html(root, f"{path.stem}-")
    root.attrib |= {"role": "img", "aria-label": caption, "stroke-linejoin": "round", "stroke-linecap": "butt"}
    boxes = "".join(
        f'<label><input type="checkbox" value="{n}" checked> {escape(name)}</label>' for n, name in enumerate(names)
    )
    drawing = ElementTree.tostring(root, encoding="unicode")
    return f'<fieldset class="curves" aria-label="Curves that are shown">{boxes}</fieldset>{drawing}'


def _named_curves(root: ElementTree.Element) -> list[str]:
    """Return the curves' names. Parts of the n-th curve get the class `curve-n` in place of their id."""
    names: list[str] = []
    for part in root.iter():
        if (name := part.get("id", "")).startswith(CURVE):
            if (name := name.removeprefix(CURVE)) not in names:
                names.append(name)
            del part.attrib["id"]
            part.set("class", f"curve-{names.index(name)}")
    return names


def _as_html(root: ElementTree.Element, prefix: str) -> None:
    """Write names as HTML does, and `prefix` before ids and references to them, since a page may have several drawings.

    Leave out the style sheet, which would hold for the whole page, and metadata.
    """
    for part in root.iter():
        part.tag = SPACE.sub("", part.tag)
        for child in [child for child in part if SPACE.sub("", child.tag) in ("style", "metadata")]:
            part.remove(child)
        named = {SPACE.sub("", name): value.replace("url(#", f"url(#{prefix}") for name, value in part.attrib.items()}
        if "id" in named:
            named["id"] = prefix + named["id"]
        if "href" in named:
            named["href"] = f"#{prefix}{named['href'].removeprefix('#')}"
        part.attrib.clear()
        part.attrib.update(named)
