"""Tables as HTML, Markdown and in terminals of any width."""

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from fedloom.sims.report.page import write_page
from fedloom.sims.report.tables import Link, Table


def test_only_digests_may_be_broken(tmp_path: Path) -> None:
    """Browsers break between words, and elsewhere only where a style allows it."""
    digest = "0123456789abcdef" * 4
    rows = [["site-0001", f"8: {digest}", "two words"], [Link("x-y", "a/b&c.html"), digest, 7]]
    text = Table("t", ["a-b", "b", "c"], rows).html()
    assert text.count(f'<span class="digest">{digest}</span>') == 2 == text.count("<span")
    assert '<td class="whole">site-0001</td>' in text and '<th class="whole">a-b</th>' in text
    assert '<td class="whole"><a href="a/b&amp;c.html">x-y</a></td>' in text
    assert "<td>two words</td>" in text
    style = write_page(tmp_path / "page.html", "t", []).read_text().split("<style>")[1].split("</style>")[0]
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", style)
    assert [name.strip() for name, rule in rules if "overflow-wrap" in rule or "word-break" in rule] == [".digest"]
    assert ".whole { white-space: nowrap }" in style


def test_tables_for_the_terminal_are_not_escaped() -> None:
    text = Table("a_b_", ["of *x*"], [["sum_{j != i} ||v|| [1] <x>"]], "`n`").plain()
    assert text.splitlines() == ["a_b_", "", "| of *x* |", "| :--- |", "| sum_{j != i} ||v|| [1] <x> |", "", "`n`"]
    assert "\x1b" not in Table("\x1b[2J", ["\x1b[2J"], [["\x1b[2J\n"]], "\x1b[2J").plain()


@given(st.text(), st.text(), st.floats() | st.none() | st.integers())
def test_html_and_rich_show_any_text(title: str, cell: str, number: float | None) -> None:
    table = Table(title, ["one", cell], [[cell, number]], note=cell)
    table.html().encode("utf-8")
    assert not re.search(r"<(?!/?(table|caption|thead|tbody|tr|th|td|p)\b)", table.html())
    Console(file=io.StringIO(), width=200).print(table.rich())


def test_rich_reads_no_markup() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(Table("[bold]t[/]", ["[red]c"], [["[/]"]]).rich())
    text = console.export_text()
    assert "[bold]t[/]" in text
    assert "[red]c" in text
    assert "[/]" in text


def test_a_narrow_terminal_folds_texts_between_words() -> None:
    rows = [["runs/digits", "finished", "sum_aggregation/exact", "96.5%"], ["runs/数字/数字", "finished", "fedavg", "9.5%"]]
    table, lines = Table("Runs", ["run", "status", "method", "test"], rows), {}
    for width in (200, 44):
        Console(file=(file := io.StringIO()), width=width).print(table.rich())
        lines[width] = file.getvalue().splitlines()
    assert any("finished │ sum_aggregation/exact │ 96.5%" in line for line in lines[200])
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines[44] if line.startswith("│")]
    folded = [["runs/", "finished", "sum_", "96.5%"], ["digits", "", "aggregation/", ""], ["", "", "exact", ""]]
    assert cells == [*folded, ["runs/", "finished", "fedavg", "9.5%"], ["数字/", "", "", ""], ["数字", "", "", ""]]
    assert {cell_len(line) for line in lines[44] if line[:1] in "┏┃┡│└"} == {44}


@pytest.mark.parametrize("width", [80, 40])
def test_a_table_of_many_columns_continues_below_without_a_cut_number(width: int) -> None:
    names = [f"domain {n}" for n in range(10)]
    rows = [[f"net{n}", *(f"{10 * n + m}.5%" for m in range(10)), "* 99.5%"] for n in range(3)]
    Console(file=(file := io.StringIO()), width=width).print(Table("t", ["network", *names, "union"], rows).rich())
    lines = file.getvalue().splitlines()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    shown = {row[0]: [cell for each in cells if each[0] == row[0] for cell in each[1:]] for row in rows}
    assert all(shown[row[0]] == row[1:] for row in rows) and max(map(cell_len, lines)) <= width
    assert sum("network " in line for line in lines if line.startswith("┃")) > 1, "the first column is in each part"
