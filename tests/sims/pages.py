"""What the tests of pages share: a page taken apart."""

import base64
import io
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image


class Page(HTMLParser):
    """Collects what a browser would load, where it leads, and the text; checks that tags are closed in order."""

    VOID = ("meta", "img", "br", "input")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.text = self.policy = ""
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "srcset", "data", "action")]
        links = [value or "" for name, value in attrs if name == "href"]
        if drawn := "svg" in (*self.open, tag):
            assert all(link.startswith("#") for link in links)
        else:
            self.links += links
        self.policy += dict(attrs).get("content") or "" if tag == "meta" else ""
        assert not any(name.startswith("on") or (name == "style" and not drawn) for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert "url(" not in data
            assert "@import" not in data
        self.text += data

    def pictures(self) -> list[Image.Image]:
        return [Image.open(io.BytesIO(base64.b64decode(source.split(",", 1)[1]))) for source in self.sources]


def checked(path: Path) -> Page:
    """The page, proved to load nothing from elsewhere and to hold pictures that decode."""
    page = Page(path)
    assert page.tags.count("script") <= 1 and "default-src 'none'; img-src data:" in page.policy
    assert not {"link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert page.tags.count("a") == len(page.links)
    assert not any(":" in link or link.startswith("/") for link in page.links)
    for picture in page.pictures():
        picture.load()
        assert picture.format == "PNG"
        assert min(picture.size) > 200
    return page
