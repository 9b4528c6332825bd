"""Tables of reports: rows, marks, notes, and their Markdown."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.sims.report.forgetting import caption, forgetting_table
from fedloom.sims.report.results import Holders, accuracy_table
from fedloom.sims.report.sites import spread_table
from fedloom.sims.report.tables import MAX_ROWS, Table, percent
from tests.sims.report_runs import results


def test_percent() -> None:
    assert [percent(x) for x in (0.914, 1.0, 0.0, None, float("nan"))] == ["91.4%", "100.0%", "0.0%", "-", "-"]


def test_accuracy_table_puts_the_sum_first_and_marks_home() -> None:
    table = accuracy_table(results(2, ["a", "b"])[1])
    assert [row[0] for row in table.rows] == ["sum", "independent", "site-0000", "site-0001"]
    assert list(table.rows[2]) == ["site-0000", "* 90.0%", "20.0%", "55.0%"]
    assert list(table.columns) == ["network", "a", "b", "union"]


def test_the_note_of_personal_networks_is_about_examples_and_not_a_mean_over_sites() -> None:
    summary = results(2, ["a", "b"])[1]
    means, pooled = "mean over the sites' own networks", "all these examples have the same weight"
    assert means in accuracy_table({**summary, "aggregate": ""}).note and means not in accuracy_table(summary).note
    only = accuracy_table({**summary, "aggregate": "", "accuracy": {"personal": {"a": 0.4, "b": 0.6, "union": 0.5}}}).note
    assert pooled in only and means not in only


def test_the_deviation_over_sites_is_that_of_these_sites() -> None:
    site = {"accuracy": 0.6, "right": 6, "images": 10, "classes": {}}
    spread = {"mean": 0.6, "deviation": 0.1, "deciles": [0.5] * 9, "sites": {"site-0000": site, "site-0001": site},
              "worst": {"site": "site-0000", "accuracy": 0.5}, "best": {"site": "site-0001", "accuracy": 0.7}}  # fmt: skip
    table = spread_table({**results(2, ["a", "b"])[1], "per_site": {"aggregate": spread}})
    assert "deviation: of these sites (divided by n)" in table.note


def test_long_tables_are_cut_and_say_so() -> None:
    summary = results(60, [f"d{i}" for i in range(30)])[1]
    table = accuracy_table(summary)
    assert len(table.rows) == MAX_ROWS
    assert len(table.columns) == 14
    assert "first 20 of 62 networks" in table.note
    assert "first 12 of 30 domains" in table.note
    assert "first 20 of 60 sites" in forgetting_table(summary).note


def test_forgetting_table_knows_who_shares_a_domain() -> None:
    alone = results(2, ["a", "b"])[1]
    assert Holders(alone).retained("site-0000") == ["b"]
    assert list(forgetting_table(alone).rows[0]) == [
        "site-0000", "a", "80.0% → 10.0%", "80.0% → 75.0%", "80.0% → 42.5%",
    ]  # fmt: skip
    shared = results(5, ["a", "b"])[1]
    assert Holders(shared).retained("site-0000") == ["a", "b"]
    table = forgetting_table(shared)
    assert [row[-1] for row in table.rows[:2]] == ["2 other sites", "site-0003"]
    assert "If another site has the same domain, forgetting this site does not lose the domain." in table.note


def test_captions_say_what_to_expect_of_a_domain_that_others_hold_too() -> None:
    captions = {sites: caption(results(sites, ["a", "b"])[1]) for sites in (2, 3, 4)}
    assert "its own domain should fall" in captions[2]
    assert "should fall on a domain that only this site held, and stay about the same on all others" in captions[3]
    assert "fall" not in captions[4] and "other sites also hold its domain" in captions[4]


def test_a_network_measured_on_all_domains_together_alone_keeps_that_column() -> None:
    summary = results(1, ["a"])[1]
    summary["accuracy"]["personal"] = {"union": 0.5}
    assert list(accuracy_table(summary).columns) == ["network", "a", "union"]


def test_rows_have_to_fit_the_columns() -> None:
    with pytest.raises(ValueError, match="takes 2 cells"):
        Table("t", ["a", "b"], [["x"]])


def unescaped(line: str) -> list[str]:
    """The cells of a line of a Markdown table."""
    return re.split(r"(?<!\\)(?:\\\\)*\|", line)[1:-1]


@pytest.mark.parametrize(
    ("cell", "side"),
    [("90.7 ± 3.7", "---:"), ("-25.2 to +35.0", "---:"), ("* 41.7% → 3.0%", "---:"), ("-", "---:"), ("3 to B", ":---")],
)
def test_columns_of_numbers_stand_to_the_right(cell: str, side: str):
    assert Table("", ["one"], [[cell], [2.5]]).markdown().splitlines()[1] == f"| {side} |"


@given(st.text(), st.text(), st.floats() | st.none() | st.integers())
def test_markdown_keeps_its_shape(title: str, cell: str, number: float | None) -> None:
    text = Table(title, ["one", cell], [[cell, number], [number, cell]]).markdown()
    lines = [line for line in text.split("\n") if line.startswith("|")]
    assert len(text.splitlines()) == len(text.split("\n")) - 1
    assert [len(unescaped(line)) for line in lines] == [2, 2, 2, 2]
    assert not re.search(r"(?<!\\)[<>`]", re.sub(r"\\\\", "", text))
