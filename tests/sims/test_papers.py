"""The papers' cells: whole tables, known numbers, doubtful ones marked, and every cell that an experiment shows is there."""

import re
from pathlib import Path

import pytest

from fedloom.conf.errors import UserError
from fedloom.sims.experiments import aggregation, arithmetic, components, lasem, papers


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_table_is_whole(paper: str) -> None:
    for name in papers.tables_of(paper):
        table = papers.cells(paper, name)
        assert table.title and table.unit in papers.SCALES and len(set(table.columns)) == len(table.columns)
        assert all(len(values) == len(table.columns) for values in (*table.rows.values(), *table.spread.values()))
        assert table.spread.keys() <= table.rows.keys()
        assert all(why and table.value(*place) is not None for place, why in table.doubtful.items())


@pytest.mark.parametrize(
    ("paper", "table", "row", "column", "text"),
    [
        ("sum_aggregation", "1", "proposed N1+N2", "union", "75.9"),
        ("sum_aggregation", "1", "baseline N2", "union", "80.8 ?"),
        ("sum_aggregation", "2", "proposed forget N2", "svhn", "47.9"),
        ("arithmetic", "2", 10, "cifar100", "37.0"),
        ("arithmetic", "A18", 3, 2, "-"),
        ("arithmetic", "6", 3, 2, "63.1"),
        ("cla_ot", "1", "cifar10", "fused, tuned", "93.7"),
        ("cla_ot", "3", "cifar10 transfer", "HMT + CLA + OTFusion", "61.3 ± 3.7"),
        ("cla_ot", "9", "cka", "first pinned", "1-2-3 ?"),
        ("cla_ot", "10", "2-3-4", "merged, sum", "51.3 ± 6.4"),
        ("cla_ot", "13", "layers added, mean", 0.1, "91.3"),
        ("cla_ot", "20", "2 networks", "ensemble, seconds", "2.72"),
        ("cla_ot", "5", "no such row", "B", "-"),
    ],
)
def test_known_numbers(paper: str, table: str, row: str | int, column: str | float, text: str) -> None:
    assert papers.cells(paper, table).shown(row, column) == text


def test_grids_that_overlap_agree() -> None:
    for coarse, fine in arithmetic.PAPER_GRIDS.values():
        one, other = papers.cells("arithmetic", coarse), papers.cells("arithmetic", fine)
        both = [(beta, alpha) for beta in (0.5, 1, 5) for alpha in (0.5, 1, 5)]
        assert all(one.value(*place) == other.value(*place) is not None for place in both)


def test_the_rows_of_sum_aggregation_are_the_papers() -> None:
    for number, rows in (("1", aggregation.TABLE_1), ("2", aggregation.TABLE_2)):
        table = papers.cells("sum_aggregation", number)
        assert all((row in table.rows) == (not row.startswith(("ours", "sites' norms"))) for row, _, _ in rows)
        assert table.columns == ("mnist", "svhn", "union")


def test_the_ten_classes_are_the_papers() -> None:
    classes = papers.classes_of("arithmetic", "cifar100_ten")
    assert len(classes) == 10 and (classes["beaver"], classes["woman"]) == (4, 98)  # of 100 names in alphabetical order
    assert sorted(classes, key=classes.__getitem__) == sorted(classes)


def test_what_is_not_there_is_reported() -> None:
    with pytest.raises(UserError, match="did you mean 'cla_ot'"):
        papers.cells("cla_to", "1")
    with pytest.raises(UserError, match="no table '6'; there are 1, 2"):
        papers.cells("cla_ot", "6")
    with pytest.raises(UserError, match="unknown task 'mnist'"):
        papers.classes_of("arithmetic", "mnist")


def test_the_page_of_the_papers_names_tables_that_there_are():
    """A page for each paper; commands and files as they are."""
    here = Path(aggregation.__file__).parent
    known = {"sum_aggregation": aggregation.TABLES, "lasem": lasem.TABLES, "components": components.TABLES}
    index = (here / "PAPERS.md").read_text(encoding="utf-8")
    for paper in papers.PAPERS:
        assert f"(papers/{paper}.md)" in index
        page = (here / "papers" / f"{paper}.md").read_text(encoding="utf-8")
        named = {name for words in re.findall(r"--table ([a-z0-9,]+)", page) for name in words.split(",")}
        assert named <= set(known.get(paper, {})), paper
        for path in re.findall(r"`((?:fusion|clients|sims|server)/[a-z_/]+\.py)`", page):
            assert (here.parents[1] / path).is_file(), path
