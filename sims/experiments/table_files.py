"""Reproductions of many tables: which are asked for, and the files that they are written to."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from fedloom.conf.errors import unknown
from fedloom.sims.report.page import Part, write_page
from fedloom.sims.report.tables import Table


def chosen(key: str, overrides: Sequence[str], known: Iterable[str]) -> tuple[list[str], list[str]]:
    """The names that overrides of this key give, and the other overrides. UserError for an unknown name."""
    asked = [word for word in overrides if word.startswith(f"{key}=")]
    names = [name for word in asked for name in word.partition("=")[2].split(",")]
    for name in names:
        if name not in known:
            raise unknown(key, name, known)
    return names, [word for word in overrides if word not in asked]


def folder_of(folder: Path, preset: str) -> Path:
    """Where a preset's results go: those of "cpu" into the folder itself, those of others beside it."""
    return folder if preset == "cpu" else folder.with_name(f"{folder.name}-{preset}")


def write(folder: Path, title: str, source: str, parts: Sequence[Part]) -> None:
    """Writes tables.md and report.html. `source`: the paper's title and authors; empty: none is named."""
    texts = [part.markdown() for part in parts if isinstance(part, Table)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tables.md").write_text("\n".join(texts), encoding="utf-8")
    named = [f"(paper): {source}."] if source else []
    write_page(folder / "report.html", title, [("", [*named, *parts])])
