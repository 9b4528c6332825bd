"""Where a key takes a text, the text stays; what is a number is one in files, overrides, sweeps and dictionaries alike."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.conf import UserError, to_yaml
from fedloom.conf.loading import from_json, load_text, read_values, to_json
from fedloom.conf.schema import Config
from fedloom.conf.yaml_text import read_yaml, write_yaml
from fedloom.server.run_folder.listing import read_config
from fedloom.sims.api import config_of
from fedloom.sims.federation.plan import Plan, site_sheets
from fedloom.sims.federation.sheets import SITE, SiteSheet, read, write

BASE = "sites: [{domain: digits}]\nobjective: fedavg\nstrategy: fedavg\nnetwork: mlp\n"
METHOD = {"objective": "fedavg", "strategy": "fedavg"}
ODD = ["007", "0123", "on", "off", "yes", "No", "y", "true", "1_000", "2020-01-01", "0x10", "0b11", "0o17", "+5", "-0",
       "1e5", "1e-1", "1.50", ".5", "1.", ".inf", ".nan", "00", "1__0", "3.0e+2", "2001-12-14T21:59:43"]  # fmt: skip


@pytest.mark.parametrize("text", [*ODD, "1:30", "12:30:45", "="])
def test_a_text_stays_as_it_is_written_however_it_is_given(text: str, tmp_path: Path):
    found = [
        load_text(f"{BASE}run: {{root: {text}}}", "mine").run.root,
        load_text(BASE, "mine", [f"run.root={text}"]).run.root,
        load_text(BASE, "mine", [f"run={{root: {text}}}"]).run.root,
        load_text(f"{BASE}presets: {{a: {{run: {{root: {text}}}}}}}", "mine", ["preset=a"]).run.root,
        config_of({**METHOD, "sites": [{"domain": "digits"}], "run": {"root": text}}, []).run.root,
        load_text(f"sites: [{{domain: digits, label: {text}}}]", "mine").roster[0].spec.label,
        load_text(BASE, "mine", [f"sites.0.label={text}"]).roster[0].spec.label,
        load_text(BASE, "mine", [f"sites=[{{domain: digits, label: {text}}}]"]).roster[0].spec.label,
        load_text(f"sites: 1\npopulation: [{{domain: digits, label: {text}}}]", "mine").roster[0].spec.label,
        load_text(f"{BASE}baselines: [{text}]", "mine").baselines[0],
        read_values(f"sites.0.label={text},b")[1][0],
        read_values(f"sites.0.label=[{text},b]")[1][0],
        read_yaml(write_yaml({"a": text}))["a"],
    ]
    variable = "equals" if text == "=" else text
    (tmp_path / SITE).write_text(f"name: {text}\nnetworks: [{text}]\nenvironment: {{{variable}: {text}}}")
    sheet = read(SiteSheet, tmp_path / SITE)
    found += [sheet.name, sheet.networks[0], *sheet.environment.values()]
    assert list(sheet.environment) == [variable]
    assert found == [text] * len(found)


@pytest.mark.parametrize("text", [*ODD, "1:30", "null", "~", "", "a: b", "#x"])
def test_texts_come_back_from_what_is_written(text: str, tmp_path: Path):
    sites = [{"domain": "digits", "label": text}]
    config = config_of({**METHOD, "sites": sites, "network": {"name": "mlp", "odd": text}}, [])
    assert load_text(to_yaml(config), "mine") == config == from_json(to_json(config))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config(tmp_path).network["odd"] == text
    write(tmp_path / SITE, SiteSheet(name=text or "x", networks=[text]))
    assert read(SiteSheet, tmp_path / SITE).networks == [text]


@pytest.mark.parametrize("text, value", [
    ("1e-1", 0.1), ("1e5", 1e5), ("1E+2", 100.0), ("-2e3", -2e3), (".5", 0.5), ("1.50", 1.5), ("12", 12), ("1_000", 1000),
    ("0x10", 16), ("yes", True), ("off", False), ("null", None), ("007", "007"), ("0123", "0123"), ("1:30", "1:30"),
    ("1e", "1e"), ("e5", "e5"), ("1.2.3", "1.2.3"), ("2020-01-01", "2020-01-01"), ("+.5", 0.5),
])  # fmt: skip
def test_what_anything_may_be_is_the_same_in_files_and_overrides(text: str, value: Any):
    assert load_text(f"{BASE.replace('mlp', '')}  {{name: mlp, a: {text}}}", "mine").network["a"] == value
    assert load_text(BASE, "mine", [f"network={{name: mlp, a: {text}}}"]).network["a"] == value
    assert load_text(BASE, "mine", [f"network.a={text}"]).network["a"] == value
    assert load_text(BASE, "mine", [f"training.augment=[{{name: x, p: {text}}}]"]).training.augment[0]["p"] == value
    assert read_values(f"network.a={text},1")[1][0] == value


@pytest.mark.parametrize("text, rounds", [("010", 10), ("1_0", 10), ("+8", 8), ("0x10", 16)])
def test_whole_numbers_are_decimal_unless_they_say_so(text: str, rounds: int):
    assert load_text(BASE, "mine", [f"rounds={text}"]).rounds == load_text(f"{BASE}rounds: {text}", "mine").rounds == rounds


def test_nothing_and_truth_values_are_not_texts_of_a_method_whose_words_are_not_known_here():
    with pytest.raises(UserError, match=r"run.root: got None, takes a text"):
        load_text(BASE, "mine", ["run.root=null"])
    with pytest.raises(UserError, match=r"sites\[0\]\.name: got True, takes a text; put it in quotes if it is a text"):
        site_sheets(Plan(sites=[{"name": True}]))


def test_a_plan_of_a_federation_keeps_names(tmp_path: Path):
    (tmp_path / "plan.yaml").write_text("sites: [{name: 0123}, {name: 1e3}, {name: on, domain: images:~/x}]")
    assert [sheet.name for sheet in site_sheets(read(Plan, tmp_path / "plan.yaml"))] == ["0123", "1e3", "on"]


def test_python_may_give_numbers_of_numpy_paths_and_tuples(tmp_path: Path):
    given = {"sites": ({"domain": f"images:{tmp_path}", "samples": np.int64(3), "classes": np.arange(2)},),
             "rounds": np.int32(7), "training": {"rate": np.float32(0.5), "channels_last": np.bool_(True)},
             "run": {"root": tmp_path, "name": np.str_("007")}, "data": {"root": Path("~")}}  # fmt: skip
    config = config_of({**METHOD, **given}, [])
    assert (config.rounds, config.training.rate, config.training.channels_last) == (7, 0.5, True)
    assert (config.run.root, config.run.name, config.data.root) == (str(tmp_path), "007", str(Path.home()))
    assert config.roster[0].spec.classes == [0, 1]
    assert config_of({**METHOD, "sites": [config.roster[0].spec]}, []).sites


@pytest.mark.parametrize("given, message", [
    ({"rounds": object()}, r"^rounds: got a value of the type object, takes texts, numbers,"),
    ({"sites": [{"domain": {1, 2}}]}, r"^sites\[0\]\.domain: got a value of the type set"),
    ({"network": {"name": "mlp", "act": np.tanh}}, r"^network\.act: got a value of the type numpy\.ufunc"),
    ({"network": {(1, 2): 3}}, r"^network: has a key that is a value of the type tuple"),
    ({"training": {"rate": 1j}}, r"^training\.rate: got a value of the type complex"),
])  # fmt: skip
def test_what_yaml_has_no_word_for_is_refused_by_key_and_type(given: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        config_of(given, [])


def test_a_home_is_written_as_a_tilde_in_every_key_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_text(BASE, "mine", ["run.root=~/x", "data.root=~", "engine.address=~/federation"])
    assert (config.run.root, config.data.root, config.engine.address) == (
        f"{tmp_path}/x",
        str(tmp_path),
        f"{tmp_path}/federation",
    )
    assert load_text(BASE, "mine", ["run.root=~nobody-of-this-name/x"]).run.root == "~nobody-of-this-name/x"
    (tmp_path / SITE).write_text("name: a\ncertificate: ~/a.crt\nkey: ~/a.key\nstore: ~/store\ndata: ~/data\npeers: ~/peers")
    sheet = read(SiteSheet, tmp_path / SITE)
    assert (
        sheet.certificate == f"{tmp_path}/a.crt" and sheet.store == f"{tmp_path}/store" and sheet.data == f"{tmp_path}/data"
    )
    assert isinstance(config, Config)
