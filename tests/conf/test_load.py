"""Configuration: what is merged, what is refused, and with which line."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom.clients.protocol import messages
from fedloom.conf import UserError, experiment_names, from_json, load, to_json, to_yaml
from fedloom.conf.loading import FOLDER, MANY, VERSION, experiment_lines, load_text
from fedloom.conf.schema import MOST_ROUNDS
from fedloom.conf.sites import SiteConfig
from fedloom.conf.yaml_text import _Fast, _read, _Reader, read_yaml, write_yaml


def test_every_shipped_experiment_loads_and_survives_the_journey():
    assert "digits" in experiment_names()
    for name in experiment_names():
        config = load(name)
        assert from_json(to_json(config)) == config
        assert config.run.name == name
        assert experiment_lines()[name]
        for preset in yaml.safe_load((FOLDER / f"{name}.yaml").read_text()).get("presets", {}):
            assert load(name, [f"preset={preset}"])


def test_overrides_reach_nested_keys_and_lists():
    config = load("digits", ["rounds=3", "engine.name=inline", "training.rate=0.5", "sites.1.samples=7", "run.name=x"])
    assert (config.rounds, config.engine.name, config.training.rate, config.run.name) == (3, "inline", 0.5, "x")
    assert [site.spec.samples for site in config.roster] == [0, 7]


def test_show_is_yaml_that_loads_again(tmp_path: Path):
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(load("digits", ["seed=5"])))
    assert load(str(path)).seed == 5


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rounds=-1", "rounds: got -1, takes a number from 1 to 999999"),
        ("rounds=abc", r"^rounds: got 'abc', takes a whole number from 1 to 999999 \(federated rounds\)$"),
        ("rounds=1.5", "rounds: got 1.5, takes a whole number"),
        ("rounds=null", "rounds: got None, takes a whole number"),
        ("training.rate=[1]", r"training.rate: got \[1\], takes a number of at least 0.0"),
        ("data.grey=maybe", "data.grey: got 'maybe', takes true or false"),
        ("data.root={a: 1}", "data.root: got {'a': 1}, takes a text"),
        ("engine.name=[ray]", r"engine.name: got \['ray'\], takes one of: inline, ray, flower"),
        ("sites=[{domain: digits, classes: x}]", r"sites\[0\].classes: got 'x', takes a list of whole numbers"),
        ("sites=[{domain: digits, networks: [3]}]", r"sites\[0\].networks: got \[3\], takes a list of sections"),
        ("population=[{domain: digits, count: x}]", r"population\[0\].count: got 'x', takes a whole number from 1"),
        ("population=[{doman: x}]", r"'population\[0\].doman'; did you mean 'population\[0\].domain'"),
        ("network=[1]", r"network: got \[1\], takes a section of keys \(name: "),
        ("network=3", "network: got 3, takes a section of keys"),
        ("rond=3", r"unknown key 'rond'; did you mean 'rounds'\?"),
        ("evaluation.patience=3", r"unknown key 'evaluation.patience'; did you mean 'stopping.patience'\?"),
        ("patience=3", r"unknown key 'patience'; did you mean 'stopping.patience'\?"),
        ("checkpoint=x", r"unknown key 'checkpoint' \(known: "),
        ("training.shuffle=true", r"unknown key 'training.shuffle' \(known: "),
        ("training.warmup=2", r"did you mean 'training.schedule'\?"),
        ("clients_per_round=4", r"did you mean 'federation.fraction'\?"),
        ("proximal_mu=0.1", r"unknown key 'proximal_mu'; did you mean 'objective.mu'\?"),
        ("shards=2", r"unknown key 'shards'; did you mean 'sites.0.partition'\?"),
        ("training.classes_per_client=2", r"did you mean 'sites.0.partition.classes_per_site'\?"),
        ("engine.nme=ray", r"unknown key 'engine.nme'; did you mean 'engine.name'\?"),
        ("engine.name=rai", "engine.name: got 'rai', takes one of: inline, ray, flower"),
        ("engine=3", "engine: got 3, takes a section"),
        ("training.rate=.nan", "training.rate: got nan"),
        ("training.momentum=2", "training.momentum: got 2.0, takes a number from 0.0 to 1.0"),
        ("sites=0", "sites: got 0, takes at least 1"),
        ("sites=[]", r"sites: got \[\], takes at least 1"),
        ("sites=3", "sites: a number needs `population`"),
        ("sites=true", "sites: got True"),
        ("sites=[3]", r"sites\[0\]: got 3"),
        ("sites=[{samples: 3}]", r"sites\[0\].domain: missing"),
        ("sites=[{domain: digits, name: a/b}]", r"sites\[0\].name: got 'a/b'"),
        ("sites=[{domain: digits, name: a}, {domain: digits, name: a}]", "two sites have the name 'a'"),
        ("sites=[{domain: digits, rotaton: 3}]", r"'sites\[0\].rotaton'; did you mean 'sites\[0\].rotation'"),
        ("sites.7.domain=x", "sites.7.domain.: sites has 2 entries"),
        ("run.name=../x", "run.name: got '../x'"),
        ("version=99", f"version: got 99, this fedloom reads up to {VERSION}; use the fedloom that wrote it"),
        ("version=0", f"version: got 0, takes a number from 1 to {VERSION}"),
        ("version=two", f"version: got 'two', takes a number from 1 to {VERSION}"),
        ("preset=cpu", "preset: digits has no presets"),
        ("preset=[cpu]", "preset: digits has no presets"),
        (f"run.name={'x' * 201}", "takes a plain folder name of at most 200 bytes"),
        ("run.name=\udcff", r"override 'run.name=\\udcff': is not UTF-8 text"),
        (f"sites=[{{domain: digits, name: {'x' * 101}}}]", r"sites\[0\].name: got 'x+\.\.\.', takes at most 100 bytes"),
        ("sites=[{domain: digits, name: sum}]", r"sites\[0\].name: 'sum' is a row of the results"),
        ("sites=[{domain: digits, label: union}]", r"sites\[0\].label: 'union' is reserved for all domains"),
        ("rounds", "override 'rounds': takes the form key=value"),
        (f"seed={'1' * 5001}", r"override 'seed=1+\.\.\.': is a number of 5001 digits, takes at most 300"),
        ("sites.foo=3", r"override 'sites\.foo': sites is a list; name an entry, such as sites\.0, or set the whole list"),
        ("sites.foo.samples=3", r"override 'sites\.foo\.samples': sites is a list"),
        (f"rounds={'[' * 3000}", "nested more than 100 deep"),
        (f"rounds={10**26}", f"rounds: got {10**26}, takes a number from 1 to 999999"),
        ("sites.0.count=100000000", r"sites\[0\]\.count: got 100000000, takes a number from 1 to 1000000"),
        ("sites.0.count=1000000", "sites: got 1000001 in all, takes at most 1000000"),
        ("sites=100000000", "sites: got 100000000 in all, takes at most 1000000"),
        ('run.name="a\\nb"', r"run\.name: got 'a.+b', takes a text in one line"),
        ("rounds=[1", "override 'rounds=.1'"),
        ('data.root="\\0"', r"data\.root: got '.*', takes a text in one line, without control characters"),
        ("training.rate=1e308", r"training\.rate: got 1e\+308, takes a number from 0\.0 to 3\.4e\+38 \(32 bits\)"),
        ("federation.fraction=0", r"federation\.fraction: got 0\.0, takes a number above 0, of at most 1\.0"),
    ],
)
def test_bad_overrides_end_in_one_line(override: str, line: str):
    with pytest.raises(UserError, match=line) as caught:
        load("digits", [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "key", "section"),
    [
        (["strategy=fedavg"], "strategy", {"name": "fedavg"}),
        (["network=mlp"], "network", {"name": "mlp"}),
        (["network=conv6"], "network", {"name": "conv6", "standardise": True, "affine": False}),  # which it is already
        (["network=mlp", "network.widths=[8]"], "network", {"name": "mlp", "widths": [8]}),
        (["sites=[{domain: digits, network: mlp}]"], "sites", [{"domain": "digits", "network": {"name": "mlp"}}]),
        (["sites=[{domain: digits}]", "sites.0.networks=[mlp]"], "sites",
         [{"domain": "digits", "networks": [{"name": "mlp"}]}]),
        (["sites=[{domain: digits}]", "sites.0.networks=[{name: mlp}]", "sites.0.networks.0=vit"], "sites",
         [{"domain": "digits", "networks": [{"name": "vit"}]}]),
        (["sites=[{domain: digits, partition: {alpha: 0.1}}]", "sites.0.partition=dirichlet"], "sites",
         [{"domain": "digits", "partition": {"name": "dirichlet", "alpha": 0.1}}]),
    ],
)  # fmt: skip
def test_a_name_stands_for_a_section_that_has_one(words: list[str], key: str, section: Any):
    config = load("digits", words)
    assert getattr(config, key) == section
    assert load_text(to_yaml(config), "digits") == config and "name: " in to_yaml(config)


def test_a_name_stands_for_a_section_in_files_and_presets_too():
    text = "sites: 2\npopulation: [{domain: digits, partition: classes}]\nengine: inline\nnetwork: mlp\nobjective: local\n"
    text += "strategy: fedavg\npresets: {big: {network: conv6, engine: {threads: 2}}}"
    config = load_text(text, "mine", ["preset=big", "engine.workers=3"])
    assert (config.engine.name, config.engine.threads, config.engine.workers) == ("inline", 2, 3)
    assert (config.network, config.objective, config.strategy) == ({"name": "conv6"}, {"name": "local"}, {"name": "fedavg"})
    assert config.population[0].partition.name == "classes"
    text = "sites: [{domain: digits}]\nstrategy: ${objective}\nobjective: {name: fedavg, rate: 1}"
    assert load_text(text, "mine").strategy == {"name": "fedavg", "rate": 1}


def test_unknown_experiment_suggests_the_nearest():
    with pytest.raises(UserError, match="did you mean 'digits'"):
        load("digit")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rounds:\n\t- 1\n", r"bad.yaml: line 2.*tab"),
        ("rounds: [1\n", r"bad.yaml: line 2"),
        ("- 1\n", "takes `key: value` lines"),
        ("rounds: \0 1\n", "bad.yaml: unacceptable character"),
        ("", "takes `key: value` lines"),
        ("~: 4", "line 1, column 1 '~' is not a valid key"),
        ("rounds: 1\ndata: {size: 8, size: 9}\n", "line 2, column 17 the key 'size' appears twice"),
        (f"sites: {'[' * 3000}", "nested more than 100 deep"),
        (f"x: {'[' * 110_000}{']' * 110_000}", "nested more than 100 deep"),
        (f"seed: {'1' * 5001}", "'seed' is a number of 5001 digits"),
        ("network: &n {name: mlp, x: *n}", "'x' refers to itself"),
        ("baselines: !!set {fedavg}", "'baselines' is !!set, takes texts, numbers, lists and sections"),
        (
            "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]\n" for n in range(9)),
            "aliases that stand for",
        ),
        ("".join(f"a{n}: &a{n} [{f'*a{n - 1}' if n else 'x'}]\n" for n in range(200)), "nested more than 100 deep"),
        ("presets: {a: hello}", "presets.a: got 'hello', takes a section of keys"),
        ("presets: {1: {seed: 3}}", "presets: got the name 1, takes texts"),
    ],
)
def test_bad_yaml_names_file_and_line(tmp_path: Path, text: str, line: str):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=line) as caught:
        load(str(path))
    assert "\n" not in str(caught.value)


ODD = "a: &a {b: 1}\nc: {<<: *a, when: 2024-01-01, time: 1:30, code: 007, rate: 1e-1, on: yes, 'off': 'no', = : ~}\n"


def test_libyaml_reads_what_pyyaml_reads():
    for text in (ODD, *(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.yaml"))):
        assert _read(text, _Fast, None) == _read(text, _Reader, None)
    assert read_yaml("a: &a {b: 1}\nc: {<<: *a, when: 2024-01-01}")["c"] == {"b": 1, "when": "2024-01-01"}


FEW = [{"domain": "digits", "samples": 10, "partition": {"name": "iid"}, "name": f"site-{n}"} for n in range(2)]
LISTED = [{**FEW[0], "name": f"site-{n}"} for n in range(2 * MANY)]


@pytest.mark.parametrize("sites", [FEW, LISTED, [*LISTED, SiteConfig("digits", name="last")]], ids=["few", "many", "mixed"])
def test_many_sites_are_written_as_few_are(sites: list[Any]):
    config = dataclasses.replace(load("digits"), sites=sites)
    text = to_yaml(config)
    assert text == write_yaml({"version": VERSION, **dataclasses.asdict(config)}) and "&" not in text
    assert len(from_json(to_json(config)).roster) == len(sites)


@pytest.mark.parametrize(
    ("change", "fault"),
    [({"samples": -1}, r"\.samples: got -1"), ({"name": "a\nb"}, r"\.name: got"), ({"kind": 1}, r"unknown key 'sites")],
)
def test_a_wrong_entry_of_many_sites_is_named(change: dict[str, Any], fault: str):
    with pytest.raises(UserError, match=fault) as caught:
        load_text(yaml.safe_dump({"sites": [*LISTED, {"domain": "digits", **change}]}), "many")
    assert f"sites[{2 * MANY}]" in str(caught.value)


def test_rounds_are_as_many_as_messages_can_number():
    assert MOST_ROUNDS == messages.MOST_ROUNDS


def test_missing_file():
    with pytest.raises(UserError, match=r"not found: nowhere.yaml"):
        load("nowhere.yaml")


def test_a_number_of_sites_is_dealt_out_in_turn(tmp_path: Path):
    path = tmp_path / "n.yaml"
    path.write_text("sites: 5\npopulation: [{domain: a}, {domain: b}]\n")
    sites = load(str(path)).roster
    assert [site.name for site in sites] == [f"site-000{i}" for i in range(5)]
    assert [(site.spec.domain, site.part, site.parts) for site in sites] == [
        ("a", 0, 3),
        ("b", 0, 2),
        ("a", 1, 3),
        ("b", 1, 2),
        ("a", 2, 3),
    ]


def test_another_network_of_a_site_or_in_a_preset_takes_no_options_of_the_one_before(tmp_path: Path):
    path = tmp_path / "p.yaml"
    path.write_text(
        "sites: [{domain: a, network: {name: mlp, widths: [3]}}, {domain: b}]\nnetwork: {name: mlp, widths: [4]}\n"
        "presets:\n  other: {network: {name: lenet, bias: false}}\n  same: {network: {bias: false}}\n"
    )
    assert load(str(path), ["preset=other"]).network == {"name": "lenet", "bias": False}
    assert load(str(path), ["preset=same"]).network == {"name": "mlp", "widths": [4], "bias": False}
    entries = load(str(path), ["sites.0.network={name: lenet}", "sites.1.network.name=conv6"]).sites
    assert isinstance(entries, list)
    assert [entry["network"] for entry in entries] == [{"name": "lenet"}, {"name": "conv6"}]


@pytest.mark.parametrize("words", [("name=dirichlet", "alpha=0.3"), ("alpha=0.3", "name=dirichlet")])
def test_an_option_may_come_before_the_name_whose_it_is(words: tuple[str, str]):
    for before in ([], ["sites.0.partition={name: size, growth: 2}"]):
        sites = load("digits", [*before, *(f"sites.0.partition.{word}" for word in words)]).sites
        assert isinstance(sites, list)
        assert sites[0]["partition"] == {"name": "dirichlet", "alpha": 0.3}


@pytest.mark.parametrize(
    "override", ["network.of={name: mlp}", "network.of.name=mlp", "network={name: split, of: {name: mlp}}"]
)
def test_another_network_inside_a_network_takes_no_options_of_the_one_before(override: str):
    """Once `network.of.strides` of the convolutions stayed, and was refused as a key of the mlp's."""
    before, after = load("components").network, load("components", [override]).network
    assert after == {**before, "of": {"name": "mlp"}}


def test_presets(tmp_path: Path):
    path = tmp_path / "p.yaml"
    path.write_text(
        "preset: paper\nsites: [{domain: a}]\npresets:\n  paper: {rounds: 200}\n  cpu: {rounds: 2, data: {size: 8}}\n"
    )
    assert load(str(path)).rounds == 200
    assert load(str(path), ["preset=cpu"]).data.size == 8
    assert load(str(path), ["preset=cpu", "rounds=3"]).rounds == 3
    with pytest.raises(UserError, match="did you mean 'cpu'"):
        load(str(path), ["preset=cpo"])
    both = load(str(path), ["preset=[paper,cpu]"])
    assert (both.rounds, both.data.size) == (2, 8)
    assert load(str(path), ["preset=[cpu,paper]"]).rounds == 200
    assert load(str(path), ["preset=[]"]).rounds == 10
    for wrong in ("[cpu,cpo]", "[[cpu]]", "{cpu: 1}"):
        with pytest.raises(UserError, match="unknown preset of p"):
            load(str(path), [f"preset={wrong}"])
    path.write_text("presets: 3\n")
    with pytest.raises(UserError, match="preset: p has no presets"):
        load(str(path), ["preset=cpu"])


@pytest.mark.parametrize("override", ["network.name=mlp", "network={name: mlp}"])
def test_another_network_starts_from_its_own_defaults(override: str):
    assert load("digits").network["standardise"]
    assert load("digits", [override]).network == {"name": "mlp"}
    assert load("digits", ["network={name: conv6, width: 0.5}"]).network["standardise"], "the same one keeps its options"
