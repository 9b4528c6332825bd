"""Tables: columns, categories, missing values, targets of every task, and what is refused."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedloom.clients import data
from fedloom.clients.data.domains import find
from fedloom.clients.data.own import encoding_of, notes
from fedloom.clients.data.tables import rows_of
from fedloom.conf import UserError
from fedloom.conf.loading import from_mapping
from fedloom.server.evaluation.evaluator import site_rows
from tests.clients.own_data import config

ROWS = 60
AGES = np.arange(ROWS) % 7 + 30.0
COLUMNS = {
    "age": AGES,
    "smoker": ["yes", "no", "former"] * 20,
    "clinic": ["north", "south"] * 30,
    "sick": [0, 1] * 30,
    "days": np.linspace(0.5, 9.5, ROWS),
}


def written(folder: Path, ending: str = "csv", **changed: object) -> str:
    table = pd.DataFrame({**COLUMNS, **changed})
    path = folder / f"patients.{ending}"
    if ending == "parquet":
        table.to_parquet(path)
    else:
        table.to_csv(path, index=False, sep="\t" if ending == "tsv" else ",")
    return f"table:{path}"


@pytest.mark.parametrize("ending", ["csv", "tsv", "csv.gz", "parquet"])
def test_every_ending_gives_the_same_numbers(tmp_path: Path, ending: str):
    domain = find(written(tmp_path, ending) + "?target=sick&features=age,smoker")
    assert domain.schema.columns == ("age", "smoker=former", "smoker=no", "smoker=yes") and domain.classes == 2
    inputs = np.asarray(domain.sources[0].images(tmp_path, "all", np.arange(3)))
    assert inputs.tolist() == [[30, 0, 0, 1], [31, 0, 1, 0], [32, 1, 0, 0]] and inputs.dtype == np.float32


@pytest.mark.parametrize("query, task, outputs, names", [
    ("target=sick", "class", 2, ()),
    ("target=smoker", "class", 3, ("former", "no", "yes")),
    ("target=days", "regression", 1, ("days",)),
    ("target=age&task=regression", "regression", 1, ("age",)),
    ("target=age,days", "regression", 2, ("age", "days")),
    ("target=sick,sicker", "multilabel", 2, ("sick", "sicker")),
])  # fmt: skip
def test_the_columns_say_what_the_task_is(tmp_path: Path, query: str, task: str, outputs: int, names: tuple[str, ...]):
    domain = find(f"{written(tmp_path, sicker=[0, 0, 1] * 20)}?{query}")
    assert (domain.schema.task, domain.classes, domain.names) == (task, outputs, names)


def test_sites_divide_a_table_by_a_column(tmp_path: Path):
    domain = written(tmp_path) + "?target=sick&without=clinic"
    settings = config({"domain": domain, "count": 2, "partition": {"name": "column", "column": "clinic", "min_samples": 1}})
    sites = [data.site_examples(settings, site) for site in settings.roster]
    assert all(bool((site.y == number).all()) for number, site in enumerate(sites)), "clinics and classes alternate"
    tests = [data.own_examples(settings, site, "test") for site in settings.roster]
    assert all(bool((test.y == number).all()) and len(test) for number, test in enumerate(tests))
    assert [data.value_of(settings, site) for site in settings.roster] == ["clinic=north", "clinic=south"]
    assert [row["part"] for row in site_rows(settings)] == ["clinic=north", "clinic=south"]


@pytest.mark.parametrize("by_rule", [False, True])
def test_a_partition_with_a_column_needs_no_name(tmp_path: Path, by_rule: bool):
    entry = {"domain": written(tmp_path) + "?target=sick&without=clinic", "count": 2}
    entry["partition"] = {"column": "clinic", "min_samples": 1}
    settings = from_mapping({"sites": 2, "population": [entry]}) if by_rule else config(entry)
    assert [data.value_of(settings, site) for site in settings.roster] == ["clinic=north", "clinic=south"]
    entry["partition"] = {"name": "iid", "column": "clinic"}
    with pytest.raises(UserError, match=r"got name=iid and column='clinic'\. Set both"):
        data.site_sizes(config(entry))
    with pytest.raises(UserError, match=r"'clinic' has 2 values, but the entry has count=1; set count=2"):
        data.site_sizes(config({**entry, "count": 1, "partition": {"column": "clinic"}}))


def test_missing_values_are_dropped_or_become_the_mean(tmp_path: Path):
    ages = AGES.copy()
    ages[:2] = np.nan
    domain = written(tmp_path, age=ages) + "?target=sick&features=age"
    dropped, filled = find(domain + "&missing=drop"), find(domain + "&missing=mean")
    assert len(dropped.sources[0].labels(tmp_path, "all")) == ROWS - 2
    inputs = np.asarray(filled.sources[0].images(tmp_path, "all", np.arange(2)))
    assert inputs[:, 0] == pytest.approx(np.nanmean(ages))


def test_rows_that_are_dropped_are_reported_and_gaps_of_categories_are_a_value(tmp_path: Path):
    domain = written(tmp_path, smoker=[None, "no", "yes"] * 20, age=[*AGES[:-1], None], sick=[None, *[0, 1] * 29, 1])
    query = "?target=sick&features=age,smoker,clinic"
    filled = find(f"{domain}{query}&missing=mean")
    assert filled.schema.columns == ("age", "smoker=missing", "smoker=no", "smoker=yes", "clinic=north", "clinic=south")
    assert notes(f"{domain}{query}&missing=mean") == ["domain 'patients': 1 of 60 rows have no target, and are not read"]
    assert notes(f"{domain}{query}&missing=drop") == [
        "domain 'patients': 21 of 60 rows have a missing value, and are not read"
    ]
    rows = {"age": [np.nan], "smoker": [None], "clinic": ["north"]}
    encoding = encoding_of(f"{domain}{query}&missing=mean")
    assert encoding is not None
    assert rows_of(encoding, rows).tolist() == [[pytest.approx(np.mean(AGES[1:-1])), 1, 0, 0, 1, 0]]
    with pytest.raises(UserError, match=r"inputs: .*'clinic' has the value 'west', takes north, south$"):
        rows_of(encoding, {**rows, "clinic": ["west"]})


def test_a_table_that_is_not_utf_8_is_refused(tmp_path: Path):
    (tmp_path / "odd.csv").write_bytes("city,sick\nKöln,0\nUlm,1\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"odd\.csv\?target=sick is not UTF-8 text; save it as UTF-8$"):
        find(f"table:{tmp_path}/odd.csv?target=sick")


def test_a_table_with_another_separator_is_refused(tmp_path: Path):
    (tmp_path / "odd.csv").write_text("age;sick\n" + "1,5;0\n2,5;1\n" * 20, encoding="utf-8")
    with pytest.raises(UserError, match="has one column, with ';' in its name; separate its columns by commas"):
        find(f"table:{tmp_path}/odd.csv?target=sick")


def test_a_file_without_a_line_of_names_is_named_as_such(tmp_path: Path):
    (tmp_path / "bare.csv").write_text("71,1.5,yes\n64,2.5,no\n" * 20, encoding="utf-8")
    with pytest.raises(UserError, match="If its first line is data, add a line with the columns' names before it"):
        find(f"table:{tmp_path}/bare.csv?target=sick")


def test_listed_categories_have_a_column_where_no_row_has_the_value(tmp_path: Path):
    domain = find(written(tmp_path) + "?target=sick&features=smoker&categories=smoker:never|no|former|yes")
    assert domain.schema.columns == tuple(f"smoker={value}" for value in ("never", "no", "former", "yes"))


@pytest.mark.parametrize("changed, query, message", [
    ({}, "", r"has the columns age, smoker, .*\?target=COLUMN"),
    ({}, "target=sik", r"has no column 'sik' \(target\); did you mean 'sick'\?"),
    ({}, "target=sick&features=age,heigth", r"has no column 'heigth' \(features\)"),
    ({}, "target=sick&target=age", r"has the key 'target' 2 times; write it once"),
    ({"sick": np.arange(ROWS, dtype=np.uint64) % 2 + 2**63}, "target=sick", r"has labels from 9223372036854775808 to 92"),
    ({}, "target=sick&colour=red", r"unknown key 'colour'; takes \?target=&features="),
    ({}, "target=sick&task=ranking", r"task: got 'ranking', takes class, multilabel, regression, tokens"),
    ({}, "target=sick&missing=zero", r"missing: got 'zero', takes refuse, drop, mean"),
    ({}, "target=sick,smoker", r"the target 'smoker' is text; several targets are numbers"),
    ({}, "target=sick&features=smoker&categories=smoker:yes|no", r"'smoker' has the value 'former', takes no, yes$"),
    ({}, "target=sick&features=smoker&categories=smoker:#1", r"'smoker' is hashed into 1 columns; write smoker:#2 to"),
    ({"age": [np.nan] * 2 + [1.0] * 58}, "target=sick", r"has missing values in age \(2\)\. Write &missing=drop"),
    ({"smoker": [None] * 2 + ["no"] * 58}, "target=sick", r"&missing=mean to .* mean \(texts: the value 'missing'\)\.$"),
    ({"sick": [None] * 2 + [1.0] * 58}, "target=sick", r"in sick \(2\)\. Write &missing=drop to drop these rows\.$"),
    ({"age": np.nan}, "target=sick&missing=mean", r"has no values in 'age'; leave it out with &?without=age"),
    ({"age": [f"{k},5" for k in range(ROWS)]}, "target=sick", r"'age' has numbers with commas, such as 0,5; write"),
    ({"name": [f"p{k}" for k in range(ROWS)]}, "target=name", r"nearly one per example\. Write &task=class for classes, or"),
    ({"name": [f"p{k}" for k in range(ROWS)]}, "target=sick", r"'name' has 60 different texts in 60 rows\. Leave it out"),
    ({"id": [f"p{k}" for k in range(ROWS)], "day": [f"2024-{k % 12 + 1:02}-{k // 12 + 1:02}" for k in range(ROWS)]},
     "target=sick", r"'id' has 60 different texts in 60 rows, 'day' 60\. Leave them out with &without=id,day, or hash them "
     r"with &categories=id:#16,day:#16\. Instead of day, add a column of numbers, such as days\.$"),
    ({"target": np.arange(ROWS) * 3}, "", r"different labels for 60 examples, nearly one per example"),
    ({"age": 1.0, "smoker": "no", "clinic": "a", "days": 2.0}, "target=sick", r"the same value in every row of all"),
    ({"age": [np.inf] + [1.0] * 59}, "target=sick&features=age", r"has infinite values in age; correct them"),
])  # fmt: skip
def test_tables_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path, changed: dict[str, object], query: str, message: str
):
    with pytest.raises(UserError, match=message) as caught:
        find(f"{written(tmp_path, 'csv', **changed)}?{query}")
    assert "\n" not in str(caught.value) and "patients" in str(caught.value)


def test_a_constant_column_is_a_warning_and_other_columns_at_another_site_are_refused(tmp_path: Path):
    first = written(tmp_path, clinic="north") + "?target=sick"
    assert any("the same value in every row of clinic" in line for line in data.remarks(config({"domain": first})))
    (tmp_path / "b").mkdir()
    second = written(tmp_path / "b") + "?target=sick"
    with pytest.raises(UserError, match=r"different examples, column 'clinic=south' is only in the second"):
        data.site_sizes(config({"domain": first}, {"domain": second, "label": "b"}))


def test_the_option_that_makes_the_categories_of_all_sites_agree_is_printed_and_works(tmp_path: Path):
    clinics = {"a": ["north", "south"] * 30, "b": ["north", "far west"] * 30, "c": "east"}
    for name, values in clinics.items():
        (tmp_path / name).mkdir()
        written(tmp_path / name, clinic=values)
    domains = [f"table:{tmp_path / name}/patients.csv?target=sick" for name in clinics]
    entries = [{"domain": domain, "label": name} for name, domain in zip(clinics, domains, strict=True)]
    with pytest.raises(UserError, match=r"same inputs and targets\. Write &categories=clinic:") as caught:
        data.site_sizes(config(*entries))
    option = str(caught.value).partition("Write &")[2].partition(" in the domain of each site.")[0]
    assert option == "categories=clinic:east|far west|north|south"
    assert data.site_sizes(config(*({**entry, "domain": f"{entry['domain']}&{option}"} for entry in entries)))


def test_a_column_that_one_table_lacks_is_to_be_left_out_at_the_others(tmp_path: Path):
    for name, more in {"a": {}, "b": {"ward": ["east", "west"] * 30, "dose": range(ROWS)}}.items():
        (tmp_path / name).mkdir()
        written(tmp_path / name, **more)
    entries = [{"domain": f"table:{tmp_path / name}/patients.csv?target=sick", "label": name} for name in "ab"]
    with pytest.raises(UserError, match="same inputs and targets") as caught:
        data.site_sizes(config(*entries))
    assert str(caught.value).endswith("targets. Write &without=dose,ward in the domain of each site with such a column.")
    entries[1]["domain"] += "&without=dose,ward"
    assert data.site_sizes(config(*entries))


def test_hashed_categories_have_the_same_columns_at_all_sites_and_tell_no_value(tmp_path: Path):
    first = find(written(tmp_path) + "?target=sick&features=smoker&categories=smoker:#16")
    assert first.schema.columns == tuple(f"smoker=#{bucket}" for bucket in range(16))
    inputs = np.asarray(first.sources[0].images(tmp_path, "all", np.arange(ROWS)))
    assert inputs.sum() == ROWS and inputs.argmax(1).tolist() == [13, 9, 10] * 20  # sha256 of yes, no, former
    (tmp_path / "b").mkdir()
    codes = written(tmp_path / "b", smoker=[1.0, 2.0, None] * 20) + "?target=sick&features=smoker&missing=drop"
    whole = written(tmp_path, smoker=[1, 2, 1] * 20) + "?target=sick&features=smoker&categories=smoker:#5"
    rows = [np.asarray(find(each).sources[0].images(tmp_path, "all", np.arange(2)))
            for each in (codes + "&categories=smoker:#5", whole)]  # fmt: skip
    assert rows[0].tolist() == rows[1].tolist()


def test_a_value_of_a_category_depends_on_no_other_row(tmp_path: Path):
    query = "?target=y&features=code&missing=drop&categories=code:#1024"
    days = pd.to_datetime(["2020-01-01 00:00"] * 2 + ["2020-01-02 10:00"] * 2)
    columns = {
        "a.csv": ["01000", "2", "SW1A", "2.5"], "b.csv": ["01000", "2", "3", "4"], "c.csv": ["01000", "2.0", "", "4"],
        "a.parquet": [1.0, 2.0, 2.5, np.nan], "b.parquet": [1, 2, 3, 4],
        "d.parquet": days, "e.parquet": days[[0, 0, 2, 2]].normalize(),
    }  # fmt: skip
    rows = {}
    for name, values in columns.items():
        table = pd.DataFrame({" code ": values, "x": range(4), "y": [0, 1, 0, 1]})
        table.to_parquet(tmp_path / name) if name.endswith("parquet") else table.to_csv(tmp_path / name, index=False)
        rows[name] = np.asarray(find(f"table:{tmp_path}/{name}{query}").sources[0].images(tmp_path, "all", np.arange(2)))
    assert rows["a.csv"].tolist() == rows["b.csv"].tolist() == rows["c.csv"].tolist() != rows["b.parquet"].tolist()
    assert rows["a.parquet"].tolist() == rows["b.parquet"].tolist()
    assert rows["d.parquet"].tolist() == rows["e.parquet"].tolist()
    filled = find(f"table:{tmp_path}/a.parquet{query.replace('drop', 'mean')}").sources[0]
    gap = np.asarray(filled.images(tmp_path, "all", np.array([3])))
    assert gap.sum() == 1.0  # a gap is a value, too


def test_sites_with_columns_in_another_order_are_refused_with_what_to_write(tmp_path: Path):
    domain = written(tmp_path) + "?target=sick&features="
    with pytest.raises(UserError, match=r"the same columns in another order; list them in one order with \?features=A,B"):
        data.site_sizes(config({"domain": domain + "age,days"}, {"domain": domain + "days,age", "label": "b"}))


def test_a_column_that_comes_twice_is_refused_since_it_could_be_the_target(tmp_path: Path):
    (tmp_path / "twice.csv").write_text("sick,age,sick\n" + "0,3.5,0\n1,4.5,1\n" * 20, encoding="utf-8")
    with pytest.raises(UserError, match="has the column 'sick' twice; rename one"):
        find(f"table:{tmp_path}/twice.csv?target=sick")
    with pytest.raises(UserError, match="lists 'age' twice; remove one of the two"):
        find(f"{written(tmp_path)}?target=sick&features=age,age")


def test_what_is_not_read_or_merged_is_reported(tmp_path: Path):
    rows = "".join(f"{row},{1_700_000_000 + row},{row % 2}\n" for row in range(40))
    (tmp_path / "times.csv").write_text(",time,sick\n" + rows, encoding="utf-8")
    domain = f"table:{tmp_path}/times.csv?target=sick"
    assert find(domain).schema.columns == ("time",)
    assert "most values of time are equal in float32" in notes(domain)[0]
    assert "1 columns without a name are not read" in notes(domain)[1]


def test_dates_of_parquet_are_categories(tmp_path: Path):
    domain = find(
        written(tmp_path, "parquet", day=pd.to_datetime(["2020-01-01", "2020-01-02"] * 30)) + "?target=sick&features=day"
    )
    assert domain.schema.columns == ("day=2020-01-01", "day=2020-01-02")


def test_an_empty_entry_in_the_column_that_divides_sites_is_refused(tmp_path: Path):
    domain = written(tmp_path, clinic=["north", "south", None] * 20) + "?target=sick&without=clinic"
    settings = config({"domain": domain, "count": 2, "partition": {"name": "column", "column": "clinic"}})
    with pytest.raises(UserError, match=r"partition\.column: 'clinic' has 20 empty entries; fill them in"):
        data.site_examples(settings, settings.roster[0])


def test_names_of_columns_can_be_url_quoted(tmp_path: Path):
    odd = {"age, years": AGES, "a&b": ["x|y", "z:"] * 30, "c+d": AGES, "x%": AGES}
    domain = written(tmp_path, **odd)
    query = "?target=sick&features=age%2C years,a%26b,c+d,x%25&categories=a%26b:x%7Cy|z%3A"
    assert find(domain + query).schema.columns == ("age, years", "a&b=x|y", "a&b=z:", "c+d", "x%")
    with pytest.raises(UserError, match=r"has no column 'ages' .* Write , & : \| % in a name as %2C %26 %3A %7C %25\."):
        find(f"{domain}?target=ages")
    with pytest.raises(UserError, match=r"unknown key 'b'; .* \(write & in a name as %26\)"):
        find(f"{domain}?target=a&b")


def test_what_is_assumed_of_the_target_is_reported(tmp_path: Path):
    domain = written(tmp_path, outcome=[3, 4, 8] * 20)
    assert notes(domain) == [
        "domain 'patients': the targets are whole numbers from 3 to 8, taken as 3 classes with these numbers as names; "
        "write ?task=regression to predict numbers, or ?task=class for all classes from 0 to 8",
        "domain 'patients': the target is the column 'outcome'; write ?target=COLUMN to choose another",
    ]
    assert not notes(f"{domain}?target=outcome&task=class") and not notes(f"{domain}?target=sick")


def test_class_numbers_with_gaps_are_names_that_sites_must_share(tmp_path: Path):
    gaps = written(tmp_path, sick=[1, 2] * 30) + "?target=sick"
    assert (find(gaps).classes, find(gaps).names) == (2, ("1", "2"))
    assert find(gaps).sources[0].labels(tmp_path, "all")[:3].tolist() == [0, 1, 0]
    assert (find(f"{gaps}&task=class").classes, find(f"{gaps}&task=class").names) == (3, ())
    (tmp_path / "b").mkdir()
    second = {"domain": written(tmp_path / "b") + "?target=sick", "label": "b"}
    with pytest.raises(UserError, match=r"class 0 is '1' in patients and '0' in b\. Use the same .* task=class behind"):
        data.num_classes(config({"domain": gaps}, second))
    assert data.num_classes(config({"domain": f"{gaps}&task=class"}, second)) == 3
    (line,) = data.remarks(config({"domain": gaps}))
    assert line.endswith("taken as 2 classes with these numbers as names; write &task=class for all classes from 0 to 2")


def test_a_column_that_divides_sites_and_is_a_feature_is_a_warning(tmp_path: Path):
    domain = written(tmp_path) + "?target=sick"
    entry = {"count": 2, "partition": {"name": "column", "column": "clinic", "min_samples": 1}}
    (line,) = data.remarks(config({"domain": domain, **entry}))
    assert "the column 'clinic' divides the sites, and is also a feature" in line and "write without=clinic behind" in line
    assert not data.remarks(config({"domain": f"{domain}&without=clinic", **entry}))


@pytest.mark.parametrize("row, entries", [("p1,34.5,1", 3), ("34.5,1,", 3), ("p1,x,34.5,1", 4)])
def test_rows_with_more_entries_than_names_are_refused_since_they_would_move_to_other_columns(
    tmp_path: Path, row: str, entries: int
):
    (tmp_path / "long.csv").write_text("age,sick\n" + f"{row}\n" * 40, encoding="utf-8")
    fault = rf"has {entries} entries in a row, but 2 names of columns\. Name each column, and remove separators at the ends"
    with pytest.raises(UserError, match=fault):
        find(f"table:{tmp_path}/long.csv?target=sick")


def test_spaces_around_texts_do_not_count(tmp_path: Path):
    domain = written(tmp_path, smoker=["yes", "no ", " no"] * 20, clinic=["north", "north "] * 30)
    query = f"{domain}?target=smoker&features=age,clinic,days"
    assert find(query).names == ("no", "yes") and "clinic=north" in find(query).schema.columns
    (encoding := encoding_of(query.replace("target=smoker", "target=days").replace(",days", ",smoker")))
    assert encoding is not None and encoding.values == {"clinic": ["north"], "smoker": ["no", "yes"]}
    rows = {"age": [30.0], "clinic": [" north"], "smoker": ["yes "]}
    assert rows_of(encoding, rows).tolist() == [[30, 1, 0, 1]]


def test_a_column_of_numbers_with_a_text_is_a_warning_or_refused(tmp_path: Path):
    domain = written(tmp_path, age=["?", *AGES[1:]], code=["a", "1", "b"] * 20) + "?target=sick&features=age,code"
    assert notes(domain) == [
        "domain 'patients': 'age' has numbers and '?', so each of its values is a category; correct such entries, or leave "
        "them empty"
    ]
    assert not notes(f"{domain}&categories=age")
    domain = written(tmp_path, days=[*np.linspace(0.5, 9.5, ROWS)[1:], "unknown"]) + "?target=sick&features=days"
    with pytest.raises(UserError, match=r"'days' has numbers and 'unknown'\. Correct such entries, or leave them empty\.$"):
        find(domain)
