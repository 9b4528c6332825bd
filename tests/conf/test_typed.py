"""Configurations as dataclasses: defaults of sections, types of fields, and errors."""

from __future__ import annotations  # so that annotations here are texts, as in some users' modules

from dataclasses import dataclass, field
from typing import Any

import pytest

from fedloom.clients.networks import NETWORKS
from fedloom.clients.objectives import OBJECTIVES
from fedloom.conf import UserError, load
from fedloom.conf.loading import from_mapping
from fedloom.conf.typed import build, build_many, option


@dataclass(frozen=True)
class Inner:
    steps: int = option(1, "steps", low=0)
    rate: float = 0.5
    fast: bool = False


@dataclass(frozen=True)
class Outer:
    scale: float = option(1.0, "scale", low=0.0, high=2.0)
    many: int = 3
    table: dict[str, Any] = option({"alpha": 1, "beta": {"low": 2, "high": 3}}, "a table")
    inner: Inner = field(default_factory=lambda: Inner(steps=7))
    extra: Inner | None = field(default_factory=lambda: Inner(steps=8))
    flags: list[bool] = option([], "flags")
    maybe: int | None = None
    rates: dict[str, float] = option({}, "by site")
    hidden: str = option("", "not listed", listed=False)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, Outer()),
        ({"scale": 1}, Outer(scale=1.0)),
        ({"scale": "0.5"}, Outer(scale=0.5)),
        ({"table": {"alpha": 4}}, Outer(table={"alpha": 4, "beta": {"low": 2, "high": 3}})),
        ({"table": {"beta": {"low": 0}}}, Outer(table={"alpha": 1, "beta": {"low": 0, "high": 3}})),
        ({"table": {"beta": 5, "more": [1]}}, Outer(table={"alpha": 1, "beta": 5, "more": [1]})),
        ({"inner": {"rate": 1}}, Outer(inner=Inner(steps=7, rate=1.0))),
        ({"inner": {}}, Outer()),
        ({"extra": {"fast": True}}, Outer(extra=Inner(steps=8, fast=True))),
        ({"extra": None}, Outer(extra=None)),
        ({"flags": [True, 0]}, Outer(flags=[True, False])),
        ({"maybe": 4}, Outer(maybe=4)),
    ],
)
def test_a_section_has_the_keys_of_its_default_that_it_lacks(values: dict[str, Any], expected: Outer):
    assert build(Outer, values) == build_many(Outer, values, "") == expected
    assert build(Outer, {}) == Outer()  # no default was changed


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"many": "x"}, "section.many: got 'x', takes a whole number"),
        ({"maybe": "x"}, "section.maybe: got 'x', takes a whole number"),
        ({"inner": {"fast": 5}}, "section.inner.fast: got 5, takes true or false"),
        ({"extra": {"fast": -1}}, "section.extra.fast: got -1, takes true or false"),
        ({"flags": [1, 2]}, "section.flags: got [1, 2], takes a list of truth values (flags)"),
        ({"rates": {"a": 0.5, "b": "hot"}}, "section.rates.b: got 'hot', takes a number"),
        ({"rates": {1: 0.5}}, "section.rates: got {1: 0.5}, takes a section of keys that are texts; put them in quotes"),
        ({"inner": {"steps": -1}}, "section.inner.steps: got -1, takes a number of at least 0"),
        ({"inner": {"stepz": 1}}, "unknown key 'section.inner.stepz'; did you mean 'section.inner.steps'?"),
        ({"inner.steps": 1}, "section.inner.steps: a key in a file or section has no dots; write inner: {steps: ...}"),
        ({"scale": 3}, "section.scale: got 3.0, takes a number from 0.0 to 2.0"),
    ],
)
def test_a_wrong_value_is_named_by_its_key(values: dict[str, Any], message: str):
    with pytest.raises(UserError) as error:
        build(Outer, values, "section")
    assert str(error.value).startswith(message)


def test_errors_do_not_offer_fields_that_are_not_listed():
    with pytest.raises(UserError) as error:
        build(Outer, {"other": 1})
    assert "hidden" not in str(error.value) and "scale" in str(error.value)
    with pytest.raises(UserError) as of_method:
        OBJECTIVES.build({"name": "fedprox", "mood": 1}, "objective")
    assert "objective.mode" not in str(of_method.value)


def test_an_annotation_that_is_not_a_type_is_named():
    @dataclass(frozen=True)
    class Wrong:
        key: NoSuchType = 1  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(UserError, match=r"Wrong: an annotation is not a type .*NoSuchType"):
        build(Wrong, {"key": 1})


def test_options_of_shipped_sections_stay_at_their_defaults():
    split = vars(NETWORKS.build({"name": "split", "of": {"width": 0.5}}, "network"))["of"]
    assert split == {"name": "conv6", "width": 0.5}
    usual = vars(OBJECTIVES.build({"name": "layer_selection"}, "objective"))["search"]
    changed = vars(OBJECTIVES.build({"name": "layer_selection", "search": {"draws": 4}}, "objective"))["search"]
    assert changed == {**usual, "draws": 4}


@pytest.mark.parametrize("override", ["data.grey=99", "engine.compile=3", "run.name={}", "run.name=[]", "network.bias=2"])
def test_values_of_another_type_are_refused(override: str):
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=f"^{key}: got .*, takes "):
        NETWORKS.build(load("digits", [override]).network, "network")


@pytest.mark.parametrize("override", ["data.grey=1", "data.grey=0", "data.grey=yes", "data.grey=true"])
def test_truth_values_may_be_numbers_and_words(override: str):
    assert load("digits", [override]).data.grey is (override != "data.grey=0")


def test_a_dotted_key_in_a_file_is_refused(tmp_path: Any):
    path = tmp_path / "own.yaml"
    path.write_text("sites: [{domain: digits}]\ntraining.rate: 0.1\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"training\.rate: a key in a file or section has no dots; write training: \{rate:"):
        load(str(path))


@pytest.mark.parametrize(("tree", "where"), [
    ({"run": {"name": "a\ud800"}}, r"run\.name"),
    ({"sites": [{"domain": "digits", "name": "\udcff"}, {"domain": "digits"}]}, r"sites\[0\]\.name"),
    ({"network": {"name": "mlp", "st\udfffart": 1}}, r"network"),
    ({"sites": [{"domain": "digits", "label": "\udcff"}] * 2000}, r"sites\[0\]\.label"),
])  # fmt: skip
def test_half_a_surrogate_pair_is_refused_where_it_is(tree: dict[str, Any], where: str):
    with pytest.raises(
        UserError, match=rf"^{where}: got '.*', which has half a surrogate pair, not a character; remove it$"
    ):
        from_mapping({"experiment": "x", "sites": [{"domain": "digits"}], **tree})
