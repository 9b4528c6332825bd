"""Result.predict and Result.evaluate on a table: the unit of the targets, and inputs that do not fit."""

import json
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torchmetrics.classification import MulticlassJaccardIndex

from fedloom import Result, run
from fedloom.clients.data import to_float
from fedloom.conf import UserError
from fedloom.server.run_folder.layout import TABLES
from tests.sims.other_data import frame, next_tokens

SETTINGS = {
    "rounds": 3,
    "network": {"name": "mlp", "widths": [8]},
    "objective": "fedavg",
    "strategy": "fedavg",
    "engine": {"name": "inline", "device": "cpu"},
}


@pytest.fixture(scope="module")
def prices(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder, random = tmp_path_factory.mktemp("prices"), np.random.default_rng(0)
    size, age = random.normal(size=200), 100 * random.normal(size=200)
    domain = frame(folder, size=size, age=age, price=5000 + 1000 * size + 10 * age)
    sites = [{"domain": f"{domain}?target=price&task=regression", "count": 2}]
    return run({**SETTINGS, "sites": sites, "training": {"epochs": 5}, "run": {"root": str(folder), "name": "prices"}})


def test_predictions_are_in_the_unit_of_the_targets(prices: Result):
    found = prices.predict(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    assert 4000 < found[0, 0] < 6000 and found[1, 0] - found[0, 0] > 300
    assert torch.equal(prices.predict(torch.tensor([[0, 0], [1, 0]], dtype=torch.uint8)), found), "whole numbers, too"
    with pytest.raises(UserError, match="probabilities: the run predicts numbers"):
        prices.predict(torch.zeros(1, 2), probabilities=True)
    whole = prices.evaluate(prices.examples("site-0000", "test"), metrics=["rmse"])
    assert whole["rmse"] < 1000


def test_features_that_do_not_fit_are_refused_in_one_line(prices: Result):
    bad = {
        r"inputs: the dict has texts in 'size'; it takes numbers": {"size": ["large"], "age": [1.0]},
        r"inputs: the dict has no column 'age' \(inputs\)": {"size": [1.0]},
        r"inputs: the dict has missing values in age; fill them in": {"size": [1.0], "age": [None]},
        r"inputs: 1 example with missing or infinite values": [[0.0, float("nan")], [1.0, 0.0]],
    }
    for line, inputs in bad.items():
        with pytest.raises(UserError, match=line):
            prices.predict(inputs)
    for shape in ((2, 3), (2,)):
        with pytest.raises(UserError, match=r"inputs: got the shape \[.*\], takes \[n, 2\]: size, age"):
            prices.predict(torch.zeros(shape))


def test_tokens_that_the_network_does_not_know_are_refused_in_one_line(tmp_path: Path):
    network = {"name": "transformer", "width": 8, "heads": 2, "layers": 1}
    settings = {**SETTINGS, "rounds": 1, "network": network, "sites": [{"domain": next_tokens(tmp_path), "count": 2}]}
    result = run({**settings, "run": {"root": str(tmp_path), "name": "walks"}})
    for odd in (torch.full((2, 8), 99), torch.ones(2, 8), torch.ones(2, 9, dtype=torch.int64)):
        with pytest.raises(UserError, match=r"inputs: the network fails on \[2, \d\] .*; it takes 8 tokens"):
            result.predict(odd)


def test_a_table_gets_the_columns_categories_and_means_of_the_run(tmp_path: Path):
    random = np.random.default_rng(0)
    columns = {"age": random.normal(size=120), "kind": ["a", "b", "c"] * 40, "sick": ["no", "yes"] * 60, "name": "x"}
    columns["age"][:5] = np.nan
    domain = f"{frame(tmp_path, **columns)}?target=sick&without=name&missing=mean"
    settings = {**SETTINGS, "rounds": 1, "sites": [{"domain": domain, "count": 2}]}
    result = run({**settings, "run": {"root": str(tmp_path), "name": "kinds"}})
    mean = np.nanmean(columns["age"])
    arrays = torch.tensor([[mean, 0, 0, 1], [2.0, 1, 0, 0]], dtype=torch.float32)
    rows = {"kind": ["c", "a"], "age": [np.nan, 2.0]}
    wanted = result.predict(arrays, scores=True)
    pd.DataFrame(rows).to_csv(tmp_path / "new.csv", index=False)
    for inputs in (rows, pd.DataFrame(rows), tmp_path / "new.csv", f"{tmp_path}/new.csv"):
        torch.testing.assert_close(result.predict(inputs, scores=True), wanted)
    torch.testing.assert_close(result.predict({"kind": ["c"], "age": [None]}, scores=True), wanted[:1])
    assert result.class_names() == ["no", "yes"]
    torch.testing.assert_close(result.predict(rows, probabilities=True), wanted.softmax(-1))
    with pytest.raises(UserError, match="inputs: the dict 'kind' has the value 'd', takes a, b, c"):
        result.predict({"kind": ["d"], "age": [1.0]})
    changed = pd.DataFrame({**columns, "kind": ["a", "b", "d"] * 40, "age": 7.0})[["sick", "kind", "name", "age"]]
    changed.to_csv(domain.partition(":")[2].partition("?")[0], index=False)
    torch.testing.assert_close(result.predict(rows, scores=True), wanted)
    (result.folder / TABLES).write_text("[1", encoding="utf-8")
    with pytest.raises(UserError, match=r"has changed since the run, so how its inputs were made is unknown; restore"):
        result.predict(rows)


def test_a_table_of_forgotten_sites_alone_leaves_no_categories_and_means_in_the_run(tmp_path: Path):
    domains = []
    for name in "ab":
        (tmp_path / name).mkdir()
        domains.append(f"{frame(tmp_path / name, age=np.arange(80) + ord(name), sick=[0, 1] * 40)}?target=sick&missing=mean")
    settings = {
        **SETTINGS,
        "rounds": 1,
        "sites": [{"domain": each, "name": name, "label": name} for name, each in zip("ab", domains, strict=True)],
    }
    result = run({**settings, "run": {"root": str(tmp_path), "name": "two"}})
    assert json.loads((result.folder / TABLES).read_text()).keys() == {*domains}
    result.unlearn("a")
    assert json.loads((result.folder / TABLES).read_text()).keys() == {domains[1]}


def test_odd_tables_are_refused_in_one_line(prices: Result, tmp_path: Path):
    (tmp_path / "ragged.csv").write_text("size,age\n1,2\n3,4,5\n", encoding="utf-8")
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "broken.csv.gz").write_bytes(b"no gzip")
    bad = {
        r"inputs: the DataFrame has no column 'size' \(inputs\)\.": pd.DataFrame([[1, 2.0]]),
        "inputs: the DataFrame has the column 'age' twice; rename one": pd.DataFrame(
            [[1, 2, 3]], columns=["size", "age", "age"]
        ),
        r"inputs: .*ragged\.csv cannot be read \(ParserError: .*\)": tmp_path / "ragged.csv",
        r"inputs: .*binary\.csv (cannot be read|has one column).*": tmp_path / "binary.csv",
        r"inputs: .*broken\.csv\.gz cannot be read \(.*\)": tmp_path / "broken.csv.gz",
    }
    for line, inputs in bad.items():
        with pytest.raises(UserError, match=line) as caught:
            prices.predict(inputs)
        assert "\n" not in str(caught.value)


def test_float_images_of_another_range_give_a_warning(finished_run: Path):
    result = Result(finished_run)
    data = result.examples("site-0000")
    usual = result.predict(data.x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right = to_float(data.x)
        noisy = right + 0.1 * torch.randn(right.shape, generator=torch.Generator().manual_seed(0))
        for images in (right, noisy, right[:1], torch.zeros(2, *right.shape[1:])):
            result.predict(images)
        assert torch.equal(result.predict(right), usual)
        assert result.evaluate((right, data.y)) == result.evaluate(data)
    for factor, way in ((1, r"x \* 2 - 1$"), (255, r"x / 127.5 - 1$")):
        odd = data.x / 255 * factor
        for call in (lambda odd=odd: result.predict(odd), lambda odd=odd: result.evaluate((odd, data.y))):
            with pytest.warns(
                UserWarning, match=rf"^inputs: float images have values from 0 to {factor}, .*{way}"
            ) as caught:
                call()
            assert caught[0].filename == __file__


def test_images_in_another_layout_are_refused_in_one_line(finished_run: Path):
    result = Result(finished_run)
    images = result.examples("site-0000").x
    with pytest.raises(
        UserError, match=r"takes images \[n, 1, height, width\]; channels come first, as after x.permute\(0, 3, 1, 2\)$"
    ):
        result.predict(images.permute(0, 2, 3, 1))
    for odd in (images[0], images[:, 0], images.repeat(1, 3, 1, 1)):
        with pytest.raises(UserError, match=r"inputs: got the shape .* takes images \[n, 1, height, width\]$"):
            result.predict(odd)


def test_inputs_and_targets_that_are_not_a_pair_are_refused(finished_run: Path):
    data = Result(finished_run).examples("site-0000")
    with pytest.raises(UserError, match=r"pass inputs and targets as a pair: evaluate\(\(inputs, targets\)\)"):
        Result(finished_run).evaluate(data.x, data.y)


def test_features_from_zero_to_one_are_no_images(prices: Result):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(prices.predict([[0.25, 0.5], [0.75, 1.0]])) == 2


def test_a_metric_can_be_a_class(finished_run: Path):
    result = Result(finished_run)
    data = result.examples("site-0000")
    named = result.evaluate(data, ["torchmetrics.classification:MulticlassJaccardIndex"])
    assert result.evaluate(data, [MulticlassJaccardIndex]) == named != {}
