"""`fedloom align` and `fedloom fuse` as a user meets them: tables, files, exit codes, one line for bad input."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from fedloom.clients.data.form import Form
from fedloom.clients.networks import initialise, load_network, parse_name, save_network
from fedloom.clients.storage.states import write_state
from fedloom.conf import load, to_yaml
from fedloom.fusion.baselines import Ensemble
from fedloom.sims.operations.domain_task import Task, accuracy
from tests.sims.commands import FEDLOOM, Command

GIVEN = ["--probe", "digits", "--samples", "40"]
FILES = {
    "a": ("mlp:widths=[12,10,8]", 8, 1),
    "b": ("mlp:widths=[8,6]", 8, 1),
    "bare": ("mlp:widths=[9,7],bias=false", 8, 1),
    "bare2": ("mlp:widths=[6,5],bias=false", 8, 1),
    "r18": ("resnet18:width=0.0625", 8, 1),
    "r34": ("resnet34:width=0.125", 8, 1),
    "h18": ("resnet18:width=0.0625,head_bias=false", 8, 1),
    "h34": ("resnet34:width=0.125,head_bias=false", 8, 1),
    "n18": ("resnet18:width=0.0625,norm=none", 8, 1),
    "n34": ("resnet34:width=0.125,norm=none", 8, 1),
    "v11": ("vgg11:width=0.0625,norm=batch", 32, 1),
    "v13": ("vgg13:width=0.125,norm=batch", 32, 1),
    "c2": ("convnet:widths=[8,12]", 8, 1),
    "c3": ("convnet:widths=[6,10,12]", 8, 1),
    "big": ("mlp:widths=[8,6]", 16, 1),
    "colour": ("mlp:widths=[8,6]", 8, 3),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write(path: Path, text: str, size: int, channels: int, classes: int = 10, named: bool = True) -> None:
    name = parse_name(text, Form.images(channels, size, classes))
    built = name.build()
    initialise(built, torch.Generator().manual_seed(len(path.stem)))
    if named:
        save_network(path, built, name)
    else:
        write_state(path, built.state_dict())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small networks in files; `seven` has seven classes, `nameless` does not say what it is, `broken` is none."""
    path = tmp_path_factory.mktemp("weave")
    for stem, (text, size, channels) in FILES.items():
        write(path / f"{stem}.safetensors", text, size, channels)
    write(path / "seven.safetensors", "mlp:widths=[8,6]", 8, 1, classes=7)
    write(path / "nameless.safetensors", "mlp:widths=[8,6]", 8, 1, named=False)
    for name, source in (("x/same", "a"), ("y/same", "b"), ("y/other", "seven"), ("y/seven", "seven")):
        (path / name).parent.mkdir(exist_ok=True)
        (path / f"{name}.safetensors").write_bytes((path / f"{source}.safetensors").read_bytes())
    (path / "run/states").mkdir(parents=True)
    (path / "run/config.yaml").write_text(to_yaml(load("digits", [])))
    (path / "broken.safetensors").write_bytes(b"no state at all")
    return path


@pytest.fixture
def weave(folder: Path, monkeypatch: pytest.MonkeyPatch, fedloom: Command) -> Command:
    """Run the command in that folder; a word that is the stem of a file there stands for the file."""
    monkeypatch.chdir(folder)
    return lambda *words: fedloom(
        *(f"{word}.safetensors" if (folder / f"{word}.safetensors").is_file() else word for word in words)
    )


def column(text: str, place: int) -> list[str]:
    """Of the tables in a text, without their heads."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row[place] for row in rows if not row[0].startswith((":", "-", "#"))]


@pytest.mark.parametrize("options", [[], ["--comparison", "wasserstein"], ["--comparison", "neurons"]])
def test_align_prints_the_map_and_draws_it(weave, folder, options):
    code, out, err = weave("align", "a", "b", *GIVEN, *options, "--out", "map.png")
    assert (code, err) == (0, "")
    assert column(out, 1) == ["extractor.1", "extractor.3", "extractor.5"]
    assert column(out, 2) == ["extractor.1", "-", "extractor.3"]
    comparison = options[-1] if options else "cka"
    assert re.search(rf"{comparison} over 40 samples of digits; cost of the map \d+\.\d{{4}}\n", out)
    assert out.endswith("written: map.png\n")
    with Image.open(folder / "map.png") as picture:
        assert min(picture.size) > 100
    (folder / "map.png").unlink()


@pytest.mark.parametrize(("deep", "shallow"), [("r34", "r18"), ("v13", "v11")])
def test_align_of_convolutional_networks(weave, deep, shallow):
    code, out, _ = weave("align", deep, shallow, *GIVEN, "--free-first", "--free-last")
    assert code == 0
    partners = [name for name in column(out, 2) if name != "-"]
    assert partners == sorted(partners, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
    assert len(partners) == {"r34": 9, "v13": 8}[deep]


def test_files_of_torch(weave, folder):
    state = load_network(folder / "b.safetensors")[0].state_dict()
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, folder / "theirs.pt")
    named = ["--size", "8", "--grey"]
    code, out, _ = weave("align", "a", "theirs.pt", *GIVEN, *named, "--network-b", "mlp:widths=[8,6]")
    assert code == 0 and column(out, 2) == ["extractor.1", "-", "extractor.3"]
    words = ("theirs.pt", "b", "--into", "2", *GIVEN, *named, "--network", "mlp:widths=[8,6]", "--out", "made.safetensors")
    assert weave("fuse", *words).code == 0
    made = load_network(folder / "made.safetensors")[0].state_dict()
    assert made.keys() == state.keys()


def test_names_on_the_command_line(weave, folder):
    named = ["--size", "8", "--grey"]
    code, out, _ = weave("align", "a", "nameless", *GIVEN, *named, "--network-b", "mlp:widths=[8,6]")
    assert code == 0 and column(out, 2) == ["extractor.1", "-", "extractor.3"]
    code, *_ = weave("fuse", "nameless", "b", "--into", "2", *GIVEN, *named, "--network", "mlp:widths=[8,6]")
    assert code == 0 and load_network(folder / "fused.safetensors")[1].options == {"widths": [8, 6]}


def test_a_file_that_records_its_form_has_it_under_another_name_too(weave, folder):
    words = ("a", "b", "--into", "2", *GIVEN, "--network", "mlp:widths=[12,10,8]", "--out", "made.safetensors")
    assert weave("fuse", *words).code == 0  # without --size 8 --grey
    assert load_network(folder / "made.safetensors")[1].form == load_network(folder / "b.safetensors")[1].form


PAIRS = [("a", "b", "1"), ("a", "b", "b"), ("r18", "r34", "2"), ("r34", "r18", "r18.safetensors"), ("v11", "v13", "v13"),
         ("bare", "bare2", "1"), ("n18", "n34", "2"), ("n34", "n18", "2")]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "into"), PAIRS)
def test_fuse_writes_a_network_that_can_be_read_back(weave, folder, one, other, into):
    code, out, err = weave("fuse", one, other, "--into", into, *GIVEN, "--out", "made.safetensors")
    assert (code, err) == (0, "") and out.endswith("written: made.safetensors\n")
    chosen = {"1": one, "2": other}.get(into, into.removesuffix(".safetensors"))
    network, name = load_network(folder / "made.safetensors")
    expected, wanted = load_network(folder / f"{chosen}.safetensors")
    assert (name.name, name.form) == (wanted.name, wanted.form)
    shapes = {key: tensor.shape for key, tensor in network.state_dict().items()}
    assert {key: tensor.shape for key, tensor in expected.state_dict().items()}.items() <= shapes.items()
    assert ("layers without bias got one" in out) is (shapes.keys() != expected.state_dict().keys())
    assert {"wire", "select", "refit", "parameters", "all"} <= set(column(out, 0))


def test_other_depth_than_widths(weave, folder):
    code, *_ = weave("fuse", "v11", "v13", "--into", "1", "--depth", "2", *GIVEN, "--out", "made.safetensors")
    network, name = load_network(folder / "made.safetensors")
    assert (code, name.name, name.options["width"]) == (0, "vgg13", 0.0625)
    assert network.get_parameter("head.weight").shape == (10, 32)


def test_convolutions_with_widths_of_one_file_and_layers_of_another(weave, folder):
    code, *_ = weave("fuse", "c2", "c3", "--into", "1", "--depth", "2", *GIVEN, "--out", "made.safetensors")
    network, name = load_network(folder / "made.safetensors")
    assert (code, name.name, name.options["widths"][0], len(name.options["widths"])) == (0, "convnet", 8, 3)
    assert network.get_parameter("head.weight").shape == (10, 12)


def test_accuracies_weights_and_report(weave, folder):
    words = ("fuse", "a", "b", "--into", "1", *GIVEN, "--labels", "digits", "--report", "--out", "made.safetensors")
    code, out, _ = weave(*words, "--weights", "0.3,0.7")
    assert code == 0
    assert out.endswith("written: made.safetensors\nwritten: made.md\n")
    report = (folder / "made.md").read_text()
    assert "**Accuracy on digits**" in report
    assert report.replace("**", "").replace("\\", "") + "\n" == out.partition("written: ")[0]
    control = "control: a.safetensors alone, fused the same way"
    assert column(out, 0)[:6] == ["network", "a.safetensors", "b.safetensors", "all of them (ensemble)", "fused", control]
    networks = [load_network(folder / f"{stem}.safetensors")[0] for stem in ("a", "b", "made")]
    shown = Ensemble(networks[:2]), networks[2], networks[0]
    for network, share in zip((*networks[:2], *shown), column(out, 1)[1:6], strict=True):
        assert share == f"{100 * accuracy(network, Task('digits', 8, True), 'test'):.1f}%"
    states = []
    for weights in ("0.3,0.7", "0.7,0.3"):
        weave(*words, "--weights", weights)
        states.append(load_network(folder / "made.safetensors")[0].get_parameter("head.weight"))
    assert not torch.equal(*states)


def test_weights_are_chosen_on_validation_images(weave, folder):
    words = ("fuse", "a", "b", "--into", "1", *GIVEN, "--labels", "digits", "--out", "made.safetensors")
    _, out, _ = weave(*words, "--weights", "search")
    line = out.partition("Weights\n")[2].splitlines()[3]
    chosen = [float(cell) for cell in line.strip("| ").split("|")]
    assert sum(chosen) == pytest.approx(1.0, abs=0.01)
    reached = []
    for weights in (",".join(map(str, chosen)), "0.5,0.5"):
        weave(*words, "--weights", weights)
        reached.append(accuracy(load_network(folder / "made.safetensors")[0], Task("digits", 8, True), "validation"))
    assert reached[0] >= reached[1]


def test_as_the_public_code_does(weave, folder):
    code, out, _ = weave("fuse", "h18", "h34", "--into", "h18", "--reference", *GIVEN, "--out", "made.safetensors")
    assert code == 0 and "head" in column(out, 0)  # it moves the outputs, too
    assert load_network(folder / "made.safetensors")[1].name == "resnet18"


def test_three_networks(weave, folder):
    code, out, _ = weave(
        "fuse", "a", "b", "a", "--into", "2", *GIVEN, "--weights", "1,2,1", "--refit", "plans", "--out", "made.safetensors"
    )
    assert code == 0
    assert load_network(folder / "made.safetensors")[1].options == {"widths": [8, 6]}
    assert {"extractor.1", "extractor.3"} <= set(column(out, 0))


def test_files_of_one_name_are_shown_with_their_folders(weave):
    code, out, _ = weave("align", "x/same", "y/same", *GIVEN)
    assert code == 0 and "x/same.safetensors" in out and "layer of y/same.safetensors" in out
    words = ("fuse", "x/same", "y/same", "--into", "y/same", *GIVEN, "--labels", "digits", "--out", "made.safetensors")
    code, out, _ = weave(*words)
    assert code == 0 and column(out, 0)[1:3] == ["x/same.safetensors", "y/same.safetensors"]
    assert "control: y/same.safetensors alone" in out and "of x/same.safetensors, " in out


def test_fewer_images_than_wanted_are_noted(weave):
    for words in (("align", "a", "b"), ("fuse", "a", "b", "--into", "1", "--out", "made.safetensors")):
        code, out, _ = weave(*words, "--probe", "digits", "--samples", "5000")
        assert code == 0 and "--samples 5000: digits has only 1294 training examples, and all were used" in out
        assert "--samples" not in weave(*words, *GIVEN).out


def test_a_distillation_starts_where_the_option_says(weave, folder):
    states = []
    for more in ([], ["--distil", "3"], ["--distil", "3", "--distil-from", "into"]):
        code, out, _ = weave("fuse", "r18", "r34", "--into", "2", *GIVEN, "--out", "made.safetensors", *more)
        assert code == 0 and ("| distilled from | r34.safetensors |" in out) is ("into" in more[-1:])
        assert ("| refit | selection |" in out) is ("into" not in more[-1:])
        states.append(load_network(folder / "made.safetensors")[0].get_parameter("head.weight"))
    assert not torch.equal(states[0], states[1]) and not torch.equal(states[1], states[2])
    assert (states[2] - load_network(folder / "r34.safetensors")[0].get_parameter("head.weight")).abs().max() < 0.01


def test_wider(weave, folder):
    code, out, _ = weave("fuse", "a", "b", "--into", "1", *GIVEN, "--width", "1.5", "--out", "made.safetensors")
    assert code == 0 and "| parameters |" in out and "of a.safetensors, " in out
    assert load_network(folder / "made.safetensors")[1].options["widths"] == [18, 15, 12]  # 1.5 x 12, 10, 8
    code, out, _ = weave("fuse", "r34", "r34", "--into", "1", *GIVEN, "--width", "2", "--out", "made.safetensors")
    assert code == 0 and "| parameters |" in out
    assert load_network(folder / "made.safetensors")[1].options["width"] == 0.25


def test_networks_of_different_classes_answer_for_all_of_them(weave, folder):
    names = ["--classes", "0,1,2,3,4,5,6", "--classes", "6,7,8,9,0,1,2"]
    code, out, _ = weave(
        "fuse", "seven", "seven", "--into", "1", *GIVEN, *names, "--labels", "digits", "--out", "made.safetensors"
    )
    assert code == 0 and "| classes | 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 |" in out
    assert column(out, 0)[:4] == ["network", "seven.safetensors", "seven.safetensors", "all of them (ensemble)"]
    assert load_network(folder / "made.safetensors")[1].form.outputs == 10


BAD = [
    (["align", "a", "nowhere.safetensors"], "nowhere.safetensors: the file does not exist"),
    (["align", "nowhere", "b"], "nowhere: the file does not exist. Pass the path of a network's .safetensors or .pt file"),
    (["align", "a", "broken"], "broken.safetensors"),
    (["align", "a", "nameless"], "does not name its network and the form of its inputs. Add --network-b NAME"),
    (["align", "nameless", "b", "--network-a", "mlp:widths=[8,5]"], "tensor 'extractor.3.weight' is [6, 8], takes [5, 8]"),
    (["align", "nameless", "b", "--network-a", "mlp:widths=[8]"], "tensor 'head.weight' is [10, 6], takes [10, 8]"),
    (
        ["align", "nameless", "b", "--network-a", "mlp:widths=[8,6]", "--size", "16"],
        "tensor 'extractor.1.weight' is [8, 64], takes [8, 256]; that is mlp for images of 1 x 16 x 16 with 10 outputs. "
        "The file fits images of 1 x 8 x 8 with 10 outputs: use --size 8",
    ),
    (
        ["align", "nameless", "b", "--network-a", "mlp:widths=[8,6]", "--probe", "cifar100"],
        "The file fits images of 1 x 8 x 8 with 10 outputs: use a --probe domain of 10 classes",
    ),
    (["align", "nameless", "b", "--network-a", "mlpp"], "unknown network 'mlpp'; did you mean 'mlp'?"),
    (["align", "nameless", "b", "--network-a", "mlp:width=3"], "unknown key 'network.width'"),
    (["align", "a", "b", "--comparison", "cca"], "unknown --comparison 'cca'; did you mean 'cka'? (known: cka, "),
    (["align", "a", "b", "--probe", "wine"], "--probe: wine has inputs of the kind features, takes a domain of images"),
    (["align", "a", "b", "--probe", "stl10"], "--probe: domain 'stl10': nothing at "),
    (["align", "a", "b", "--out", "run/map.png"], "--out: run/map.png is inside the folder of the run run; use another"),
    (
        ["fuse", "a", "b", "--into", "1", "--labels", "wine"],
        "--labels: wine has inputs of the kind features, takes a domain",
    ),
    (
        ["fuse", "a", "b", "--into", "1", "--out", "run/states/f.safetensors"],
        "is inside the folder of the run run; use another",
    ),
    (["align", "a", "b", "--probe", "digit"], "unknown domain 'digit'; did you mean 'digits'?"),
    (["align", "a", "b", "--data", "/nowhere"], "data.root: /nowhere is not an existing folder"),
    (["align", "a", "b", "--out", "nowhere/map.png"], "--out: the folder nowhere does not exist"),
    (["align", "a", "b", "--out", "map.doc"], "--out: got 'map.doc', takes a name that ends in .png, .pdf, .svg"),
    (["align", "a", "r18"], "the networks are of different families"),
    (["align", "a", "big"], "big.safetensors: is for images of 1 x 16 x 16, a.safetensors for images of 1 x 8 x 8"),
    (
        ["fuse", "a", "colour", "--into", "1"],
        "colour.safetensors: is for images of 3 x 8 x 8, a.safetensors for images of 1 x 8 x 8",
    ),
    (
        ["fuse", "a", "b", "--into", "1", *("--classes", "network 9,x") * 2],
        "a.safetensors: 2 class names, 2 different, for 10",
    ),
    (["fuse", "b", "seven", "--into", "1"], "seven.safetensors has 7 classes, the others 10"),
    (["fuse", "a", "b", "--into", "c"], "--into: 'c' is not one of the networks; takes a.safetensors, b.safetensors"),
    (["fuse", "a", "b", "--into", "0"], "--into: '0' is not one of the networks"),
    (["fuse", "a", "b", "--into", "1", "--depth", "3"], "--depth: '3' is not one of the networks"),
    (["fuse", "a", "--into", "1"], "fuse: a.safetensors is the only file; use two or more"),
    (["fuse", "a", "b", "--into", "1", "--weights", "a,b"], "--weights: got 'a,b', takes numbers such as 0.3,0.7"),
    (["fuse", "a", "b", "--into", "1", "--weights", "search"], "--weights search: needs --labels"),
    (["fuse", "a", "b", "--into", "1", "--refit", "all"], "--refit: got 'all', takes one of: none, plans, regression"),
    (["fuse", "a", "b", "--into", "1", "--width", "2", "--refit", "plans"], "--width: got 2 with refit 'plans'"),
    (["fuse", "a", "b", "--into", "1", "--distil", "-3"], "fedloom: --distil: got -3, takes a number, or 0 for none"),
    (
        ["fuse", "a", "b", "--into", "1", "--distil", "3", "--distil-from", "c"],
        "fedloom: --distil-from: got 'c', takes one of: ",
    ),
    (["fuse", "a", "b", "--into", "1", "--distil-from", "into"], "fedloom: --distil-from: got 'into' with distillation 0"),
    (["fuse", "a", "b", "--into", "1", "--distil-from", "into", "--reference"], "the public code has no --refit"),
    (["fuse", "a"], "fuse: a.safetensors is the only file; use two or more"),
    (["fuse", "a", "b"], "--into: is missing; name the file with the widths of the result: --into a.safetensors"),
    (
        ["fuse", "x/same", "y/same", "--into", "same"],
        "--into: 'same' names x/same.safetensors, y/same.safetensors; use one of these, or a number from 1 to 2",
    ),
    (
        ["fuse", "x/same", "y/same", "--into", "z"],
        "--into: 'z' is not one of the networks; takes x/same.safetensors, y/same",
    ),
    (["fuse", "x/same", "y/other", "--into", "1"], "fedloom: other.safetensors has 7 classes, the others 10"),
    (
        ["fuse", "seven", "y/seven", "--into", "1", "--classes", "network 9,x", "--classes", "0,1"],
        "/seven.safetensors: 2 class",
    ),
    (["fuse", "a", "b", "--into", "1", "--weights", "1"], "fedloom: --weights: [1.0] for 2 networks"),
    (["fuse", "a", "b", "--into", "1", "--weights", "-1,2"], "fedloom: --weights: [-1.0, 2.0] for 2 networks"),
    (["fuse", "a", "b", "--into", "1", "--out", "nowhere/f.safetensors"], "--out: the folder nowhere does not exist"),
    (["fuse", "a", "b", "--into", "1", "--labels", "digit"], "unknown domain 'digit'"),
    (
        ["fuse", "seven", "seven", "--into", "1", "--labels", "digits"],
        "seven.safetensors: has 7 outputs, but --labels digits",
    ),
    (["fuse", "a", "b", "--into", "1", "--classes", "0,1"], "--classes: 1 lists of names for 2 files; takes one for each"),
    (
        ["fuse", "a", "b", "--into", "1", "--classes", "0,1", "--classes", "0,1"],
        "a.safetensors: 2 class names, 2 different, for 10",
    ),
    (["fuse", "a", "b", "--into", "1", "--out", "a"], "--out: a.safetensors is one of the networks to fuse"),
    (["fuse", "a", "b", "--into", "1", "--out", "."], "--out: . is not a path of a file"),
    (["fuse", "a", "b", "--into", "1", "--out", "x.md", "--report"], "x.md: would be the report, but is in use"),
    (["fuse", "a", "b", "--into", "1", "--reference", "--width", "2"], "--reference: the public code has no --refit"),
    (["fuse", "r18", "r34", "--into", "1", "--reference"], "'head' has a bias, and the widths differ at "),
    (["fuse", "r18", "r34", "--into", "1", "--width", "1.3"], "--width 1.3: no named network has 1.3 times the channels"),
    (["fuse", "v11", "v13", "--into", "1"], "cannot be merged into the next one"),
    (
        ["fuse", "r18", "r34", "--into", "1", "--depth", "2"],
        "use one file for --into and --depth, or fedloom.fuse in Python",
    ),
]


@pytest.mark.parametrize(("words", "line"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(weave, folder, words, line):
    before = sorted(folder.iterdir())
    defaults = [*GIVEN, "--size", "8", "--grey"]
    out = [] if "--out" in words else ["--out", "none.png" if words[0] == "align" else "none.safetensors"]
    code, printed, err = weave(*words[:1], *defaults, *out, *words[1:])
    assert (code, printed) == (2, "")
    assert err.startswith("fedloom: ") and err.count("\n") == 1 and line in err
    assert sorted(folder.iterdir()) == before


def test_a_real_process(folder):
    words = [FEDLOOM, "align", "a.safetensors", "b.safetensors", *GIVEN]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
