"""Fedloom as a library: what a user of Python passes, and what comes back."""

import dataclasses
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom import FusionSettings, Model, RecordSpec, Result, Results, compare, resume
from fedloom.clients.data import to_float
from fedloom.clients.networks import architecture_of
from fedloom.conf import UserError, load
from fedloom.conf.errors import for_python
from fedloom.conf.metrics import facts_of
from fedloom.conf.plain_values import plain_value
from fedloom.sims.networks import Networks
from fedloom.sims.operations.unlearn import UnlearningRequest
from fedloom.sims.sweeps.best import Best
from fedloom.sims.sweeps.outcome import Outcome
from tests.sims.commands import SMALL
from tests.sims.test_api import TREE

MODULE = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(channels * size * size, 12), nn.ReLU(), nn.Linear(12, classes))

    class Inner(nn.Module):
        pass

def shades():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 4
    images = (labels / 4)[:, None, None, None] + 0.2 * torch.rand(120, 1, 8, 8, generator=generator)
    return images.clamp(0, 1), labels
"""


@pytest.fixture
def root(tmp_path: Path) -> str:
    return f"run.root={tmp_path / 'user'}"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A user's module, next to the script."""
    (tmp_path / "shades_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("shades_of_mine")
    sys.modules.pop("shades_of_mine")


def test_options_of_a_request_are_named():
    with pytest.raises(TypeError):
        UnlearningRequest(["site-0001"], "r1", "asked", 1, True)  # type: ignore[misc]
    assert UnlearningRequest(["site-0001"], "r1", "asked", repair=1, retrain=True).options["retrain"]


# What describes an experiment


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"name": "inline"}, {"name": "ray", "workers": 2}], ids=["inline", "ray"])
def test_classes_and_functions_stand_for_their_names(root: str, module, engine: dict[str, object]):
    tree = {**TREE, "sites": [{"domain": module.shades, "count": 2}], "network": module.Net, "engine": engine}
    result = fedloom.run(tree, root)
    assert result.config.network["name"] == "shades_of_mine:Net"
    assert result.config.roster[0].spec.domain == "shades_of_mine:shades"
    assert fedloom.Result(result.folder).accuracy["sum"]["union"] > 0.2


def test_an_object_that_another_process_cannot_import_is_refused(module, monkeypatch: pytest.MonkeyPatch):
    assert plain_value([module.Net, module.Net.Inner], "networks") == ["shades_of_mine:Net", "shades_of_mine:Net.Inner"]

    class Local:
        pass

    for odd in (Local, lambda: 1):
        with pytest.raises(
            UserError, match=r"^network: '.*' is defined inside a function.*; move it to the top level"
        ) as caught:
            plain_value({"network": odd}, "")
        assert "\n" not in str(caught.value)
    first = module.Net
    importlib.reload(module)
    with pytest.raises(UserError, match=r"^network.name: importing 'shades_of_mine:Net' does not give this object"):
        plain_value({"network": {"name": first}}, "")
    monkeypatch.setattr(module.Net, "__module__", "__main__")
    with pytest.raises(UserError, match=r"'Net' is defined in a script or notebook"):
        plain_value({"network": module.Net}, "")


SCRIPT = """
import sys
import torch
from torch import nn
import fedloom

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, images):
        return self.layers(images)

def images():
    return torch.randint(0, 255, (60, 8, 8), dtype=torch.uint8), torch.arange(60) % 3

tree = {"sites": [{"domain": images, "count": 2}], "network": Net, "rounds": 1, "data": {"size": 8},
        "objective": "fedavg", "strategy": "fedavg", "run": {"root": "runs"}}
for engine in ("ray", "inline"):
    try:
        print(fedloom.run(tree, f"engine.name={engine}").config.network["name"])
    except fedloom.UserError as error:
        print(error)
over = {"network.name": [Net]}
known = {**tree, "network": "conv6", "sites": [{"domain": "digits", "count": 2, "samples": 20}]}
for parallel in (2, 1):
    try:
        print(len(fedloom.sweep(known, "engine.name=inline", over=over, seeds=[0, 1], parallel=parallel)))
    except fedloom.UserError as error:
        print(error)
"""


def test_inline_runs_take_classes_and_functions_of_a_script(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refused, name, parallel, sweep = done.stdout.splitlines()
    assert name == "__main__:Net" and sweep == "2"
    assert refused.startswith("sites[0].domain: 'images' is defined in a script") and "engine.name=inline" in refused
    assert parallel.startswith("network.name[0]: 'Net' is defined in a script") and "parallel=1" in parallel
    with pytest.raises(UserError, match=r"'__main__:Net' has no 'Net'; define it in this script or notebook first"):
        fedloom.resume(tmp_path / "runs" / "experiment", "rounds=2")


@pytest.mark.parametrize(
    "turned", [lambda x: x, lambda x: x.numpy(), lambda x: x.numpy().tolist(), lambda x: list(x.numpy())]
)
def test_data_in_a_configuration_are_refused_at_once(root: str, turned):
    images, labels = torch.rand(1797, 1, 8, 8), torch.zeros(1797)
    with pytest.raises(UserError, match=r"^sites\[0\].domain: got .* with over 10,000 numbers.*'module:function'$"):
        fedloom.run({**TREE, "sites": [{"domain": (turned(images), turned(labels))}]}, root)
    own: list[object] = []
    own.append(own)
    with pytest.raises(UserError, match="contains itself"):
        plain_value(own, "sites")
    assert plain_value(np.arange(10_000), "seeds")[-1] == 9999 and len(plain_value([{"a": 1}] * 20_000, "sites")) == 20_000


def test_a_loaded_configuration_is_an_experiment(root: str, tmp_path: Path):
    small = ["sites=[{domain: digits, count: 2, samples: 20}]", "data.size=8", "data.test_limit=50", "engine.name=inline"]
    config = fedloom.load("digits", *small, "rounds=1")
    assert config == fedloom.load("digits", [*small, "rounds=1"]) and config.rounds == 1
    result = fedloom.run(config, "rounds=2", root)
    same = fedloom.run("digits", *small, "rounds=2", root, "run.name=same")
    assert result.folder.name == "digits" and result.summary["digest"] == same.summary["digest"]
    (tmp_path / "mine.yaml").write_text("sites: [{domain: digits}]\n")
    assert fedloom.load(tmp_path / "mine.yaml", "rounds=3").rounds == 3
    with pytest.raises(UserError, match=r"^rounds: got 'two', takes"):
        fedloom.run(dataclasses.replace(config, rounds="two"), root)  # type: ignore[arg-type]
    for odd in (config, None):
        with pytest.raises(UserError, match=r"^experiment: got .{,110}, takes a name such as 'digits' or the path"):
            fedloom.load(odd)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="takes words such as"):
        fedloom.load("digits", {"rounds": 2})  # type: ignore[arg-type]


def test_keys_as_keywords_get_a_hint(root: str, tmp_path: Path):
    for function in (fedloom.run, fedloom.resume, fedloom.sweep, fedloom.load):
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'rounds'; write a key .* as a text: \"rounds=1\""):
            function("digits", rounds=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="did you mean 'overwrite'"):
        fedloom.run("digits", overwrit=True)  # type: ignore[call-arg]


def test_a_dictionary_inherits_nothing(root: str, tmp_path: Path):
    inherits = r"^experiment: nothing is inherited from 'digits'.*run\('digits', 'rounds=2'\)$"
    with pytest.raises(UserError, match=inherits):
        fedloom.run({"experiment": "digits", "rounds": 2}, root)
    (tmp_path / "mine.yaml").write_text("experiment: digits\n")
    with pytest.raises(UserError, match=inherits):
        load(str(tmp_path / "mine.yaml"))
    config = load(str(tmp_path / "mine.yaml"), ["sites=[{domain: digits}]"])
    assert config.roster[0].spec.domain == "digits"


# What comes back


@pytest.fixture
def result(request: pytest.FixtureRequest) -> Result:
    return Result(request.getfixturevalue("finished_run"))


def test_a_result_stands_for_its_folder(result: Result, tmp_path: Path):
    whole = compare(str(result.folder)).as_json()
    for runs in (result, [result], (result, result.folder), Results((result,), {})):
        assert compare(runs).as_json() == whole
    assert Result(result) == result and Path(result) == result.folder
    copy = Result(shutil.copytree(result, tmp_path / "copy"))
    assert resume(copy, "rounds=3").metrics[-1]["round"] == 3
    assert plain_value({"start": result}, "") == {"start": str(result.folder)}


def test_a_text_of_an_object_is_one_short_line(result: Result):
    compared, some = compare(result), result.examples("site-0001")
    many = Networks(result.folder, result.config, "")
    many._files = dict.fromkeys(map(str, range(1000)), result.folder)
    swept = Results((result,) * 30, {result.folder: "why"}, [Outcome(result.folder, {}, "finished", summary=result.summary)])
    best = Best(facts_of("accuracy"), {"training.rate": 0.1}, 0.5, [result.folder] * 30)
    state = result.network.state_dict()
    spec = RecordSpec(like=state, slot="mean")
    one, other = result.networks["site-0001"], result.networks["site-0002"]
    aligned = fedloom.align(one, other, probe=to_float(some.x))
    groups, tables = compared.groups, compared.tables()
    objects = [result, result.config, compared, groups, groups[0].entries, compared.differences, tables, some, many, swept]
    objects += [swept.outcomes, best, spec, aligned, FusionSettings(), Model(architecture_of(result.config), state)]
    for each in objects:
        assert len(repr(each)) < 250 and "\n" not in repr(each), repr(each)
    assert repr(compared) == f"Comparison(1 row, 1 run, {len(compared.notes)} notes)"
    assert repr(result.networks) == "Networks(sum, site-0000, site-0001, site-0002)"
    assert repr(many) == "Networks(0, 1, 2, 3, 4, ... 1000 in all)"
    assert repr(some) == f"Examples(x: uint8 {list(some.x.shape)}, y: int64 [{len(some)}])"
    assert repr(swept) == "Results(30 runs, 1 failed)" and repr(best) == "Best(accuracy, 50.0%, rate=0.1, 30 runs)"
    assert repr(FusionSettings(width=2.0)) == "FusionSettings(width=2.0)"
    assert repr(result.config) == "Config(digits: sum_aggregation, 3 sites, 2 rounds)"
    assert "wrong sites" in repr(dataclasses.replace(result.config, sites=None))


def test_an_unknown_network_is_an_error_of_the_user_and_of_a_mapping(result: Result):
    for unknown in (lambda: result.networks["zz"], lambda: result.predict(torch.zeros(1, 1, 8, 8), network="zz")):
        for kind in (UserError, KeyError):
            with pytest.raises(kind, match=r"^unknown network 'zz' \(known: site-0000, site-0001, site-0002, sum\)$"):
                unknown()
    assert result.networks.get("zz") is None and "zz" not in result.networks


# What errors say


def test_errors_name_arguments_and_not_options_of_the_command_line(result: Result, root: str, tmp_path: Path):
    again = [*SMALL, f"run.root={result.folder.parent}"]
    said = {
        r"exists .*: add overwrite=True, or set another run\.name=$": lambda: fedloom.run("digits", *again),
        r"^back: has no effect without restore; add restore N$": lambda: result.unlearn(["site-0001"], back=0.5),
        r"^export: name a file with pt, torch_export or onnx$": lambda: result.export(),
        r"^by: unknown key 'nothing'": lambda: compare(result, by="nothing"),
        r"is not a run of fedloom .*; name a run's folder \(`fedloom runs` lists them\)$": lambda: Result(tmp_path),
        r"^override '--quiet': takes the form": lambda: fedloom.run("digits", "--quiet"),
    }
    for message, call in said.items():
        with pytest.raises(UserError, match=message):
            call()
    assert "--" not in compare([result]).text().replace("---", "")


def test_a_quoted_command_keeps_its_options():
    @for_python
    def function() -> None:
        raise UserError("--by: run `fedloom ledger RUN --check` or 'fedloom readmit RUN --node 3', leave --without-data out")

    with pytest.raises(UserError, match=r"^by: run `fedloom ledger RUN --check` or .* --node 3', leave without_data out$"):
        function()


# What is measured


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fedloom.run("digits", *SMALL, "rounds=1", f"run.root={tmp_path_factory.mktemp('classified')}")


@pytest.mark.parametrize(
    ("turned", "message"),
    [
        (lambda y: y[:5], "inputs, but 5 targets"),
        (lambda y: 3, "but 1 targets"),
        (lambda y: None, "got targets of the type NoneType, takes a tensor"),
        (
            lambda y: [str(one) for one in y.tolist()],
            "got targets of the type list, takes .* number of each example's class",
        ),
        (lambda y: y.numpy().astype(str), "got targets of the type ndarray of <U.*, takes"),
        (lambda y: torch.nn.functional.one_hot(y, 10), r"got targets of the shape \[\d+, 10\], takes \[\d+\]: the number"),
        (lambda y: y + 0.5, "got the target .*5, but a class is a whole number from 0 to 9"),
        (lambda y: y + 10, "got the target 1.*, but a class is a whole number from 0 to 9"),
        (lambda y: y * float("nan"), "targets that are missing or infinite"),
    ],
)
@pytest.mark.parametrize("metrics", [(), ["f1", "auroc"]])
def test_targets_that_do_not_fit_are_refused_in_a_line(classified: Result, turned, message: str, metrics):
    examples = classified.examples("site-0000")
    with pytest.raises(UserError, match=f"^data: .*{message}") as caught:
        classified.evaluate((examples.x, turned(examples.y)), metrics)
    assert "\n" not in str(caught.value)
    usual = classified.evaluate(examples, metrics)
    assert usual == classified.evaluate((examples.x, examples.y.float()[:, None]), metrics)
    assert usual == classified.evaluate((examples.x, examples.y.tolist()), metrics)


class _Fails(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 10)), "fails on the run's test examples .*1 x 8 x 8"),
        (torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4)), r"got outputs of the shape \[60, 4\].*\[n, 10\]"),
        (torch.nn.Flatten(0), "got outputs of the shape"),
        (_Fails(), "fails on the run's test examples .KeyError: 'no such thing'"),
        (torch.nn.Linear, "takes a torch module"),
        ("conv6", "got 'conv6', takes a torch module"),
    ],
)
def test_a_network_of_another_shape_is_refused_in_a_line(classified: Result, network, message: str):
    with pytest.raises(UserError, match=f"^network: .*{message}") as caught:
        classified.measure(network)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("odd", [3, None, "a\0b", b"runs", {"a": 1}])
def test_what_is_no_folder_is_refused_in_a_line(odd):
    for opened in (Result, resume):
        with pytest.raises(UserError, match=r"^folder: got .*, takes the path of a run's folder"):
            opened(odd)
