"""Networks by name, and their files: what is saved comes back bit for bit, every bad file is refused with its tensor."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedloom.clients.data.form import Form
from fedloom.clients.networks import NetworkName, initialise, load_network, parse_name, save_network
from fedloom.clients.storage.states import read_metadata, read_state, write_state
from fedloom.conf import UserError

TORCHVISION = ["torchvision:resnet18", "torchvision:vgg11_bn", "torchvision:mobilenet_v2"]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def saved(path: Path, text: str = "conv6:norm=batch", **changes: torch.Tensor) -> NetworkName:
    """A file of the named network, some tensors changed."""
    name = parse_name(text, Form.images(3, 32, 7))
    network = name.build()
    initialise(network, torch.Generator().manual_seed(0))
    write_state(path, {**network.state_dict(), **changes}, built_as=json.dumps({**vars(name), "form": name.form.plain()}))
    return name


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("vgg13", "vgg13", {}),
        ("vgg13:norm=batch,width=0.5", "vgg13", {"norm": "batch", "width": 0.5}),
        ("conv6: bias = true , groups=2", "conv6", {"bias": True, "groups": 2}),
        ("mlp:widths=[40,20],bias=false", "mlp", {"widths": [40, 20], "bias": False}),
        ("conv6:norm=none", "conv6", {"norm": "none"}),
        ("torchvision:resnet18", "torchvision:resnet18", {}),
        ("split:of={name: mlp, widths: [9, 7]},at=1", "split", {"of": {"name": "mlp", "widths": [9, 7]}, "at": 1}),
    ],
)
def test_names_are_read(text, name, options):
    assert parse_name(text, Form.images(1, 28, 10)) == NetworkName(name, options, Form.images(1, 28, 10))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("vgg12", r"unknown network 'vgg12'; did you mean 'vgg1\d'\?"),
        ("", r"unknown network ''"),
        ("torchvison:resnet18", r"cannot find module 'torchvison'"),
        ("vgg13:norm", r"network 'vgg13:norm': got the option 'norm', takes vgg13:KEY=VALUE"),
        ("vgg13:", r"got the option ''"),
        ("vgg13:norm=", r"got the option 'norm='"),
        ("vgg13:width=1,,bias=true", r"got the option ''"),
        ("vgg13:width=1,width=2", r"got the option 'width=2', takes .* each key once"),
        ("mlp:widths=[40", r"the value of 'widths' cannot be read: '\[40'"),
    ],
)
def test_texts_that_name_nothing(text, line):
    with pytest.raises(UserError, match=line) as caught:
        parse_name(text, Form.images(3, 32, 10))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            NetworkName("torchvision:resnet19", {}, Form.images(3, 32, 7)),
            r"unknown network .*did you mean 'torchvision:resnet\d+'\?",
        ),
        (NetworkName("torchvision:fasterrcnn_resnet50_fpn", {}, Form.images(3, 32, 7)), r"unknown network"),
        (NetworkName("torchvision:resnet18", {"width": 2}, Form.images(3, 32, 7)), r"takes no options, got width"),
        (NetworkName("torchvision:resnet18", {}, Form.images(1, 32, 7)), r"takes images of 3 channels, got 1"),
        (NetworkName("conv6", {"name": "vgg11"}, Form.images(3, 32, 7)), r"unknown key 'network\.name'"),
        (NetworkName("conv6", {"width": None}, Form.images(3, 32, 7)), r"width: "),
        (NetworkName("conv6", {"width": "wide"}, Form.images(3, 32, 7)), r"width: "),
    ],
)
def test_names_that_build_nothing(name, line):
    with pytest.raises(UserError, match=line) as caught:
        name.build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", TORCHVISION)
def test_torchvisions_networks_are_built_as_they_are(text):
    before = torch.get_rng_state()
    built = parse_name(text, Form.images(3, 64, 5)).build()
    assert torch.equal(torch.get_rng_state(), before)
    assert type(built).__module__.startswith("torchvision.models")
    with torch.inference_mode():
        assert built.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 5)


def test_torchvision_is_imported_only_when_asked_for():
    built = "fedloom.clients.networks.parse_name('vgg13', fedloom.clients.data.form.Form.images(3, 32, 7)).build()"
    code = f"import sys, fedloom.clients.networks; {built}; assert 'torchvision' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(
    "text",
    [
        "conv6",
        "mlp:widths=[20]",
        "lenet",
        "resnet20:norm=batch",
        "wide_resnet:depth=10,widen=1",
        TORCHVISION[0],
        TORCHVISION[2],
    ],
)
def test_what_is_saved_comes_back(tmp_path, text):
    name = parse_name(text, Form.images(3, 64, 5))
    built = name.build()
    initialise(built, torch.Generator().manual_seed(3))
    images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        built.train()(images)  # running statistics and counts move
    save_network(tmp_path / "a.safetensors", built, name)
    back, loaded_name = load_network(tmp_path / "a.safetensors")
    assert loaded_name == name
    assert not back.training
    state = back.state_dict()
    for key, tensor in built.state_dict().items():
        assert state[key].dtype == tensor.dtype
        assert torch.equal(state[key], tensor), key
    assert {int(m.num_batches_tracked or 0) for m in back.modules() if isinstance(m, nn.BatchNorm2d)} <= {1}
    with torch.inference_mode():
        assert torch.equal(back(images), built.eval()(images))


def test_a_given_name_goes_before_the_files_own(tmp_path):
    path = tmp_path / "a.safetensors"
    name = saved(path)
    write_state(path, read_state(path))
    assert load_network(path, name)[1] == name
    saved(path)
    with pytest.raises(UserError, match=r"'head\.weight' is \[7, 64\], takes \[9, 64\]"):
        load_network(path, parse_name("conv6:norm=batch", Form.images(3, 32, 9)))


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"name": "conv6", "standardise": True, "affine": False}, "conv6:standardise=true,affine=false"),
        ({"name": "mlp", "widths": [40, 20]}, "mlp:widths=[40,20]"),
        ({"name": "vgg13", "norm": "batch"}, "vgg13:norm=batch"),
        ({"name": "vgg13"}, "vgg13"),
    ],
)
def test_files_of_a_run_say_which_flag_to_give(tmp_path, section, text):
    path = tmp_path / "aggregate.safetensors"
    built = parse_name(text, Form.images(1, 32, 7)).build()
    initialise(built, torch.Generator().manual_seed(0))
    write_state(path, built.state_dict(), network=json.dumps(section), display_name="sum")
    with pytest.raises(UserError) as caught:
        load_network(path)
    form = " --size 32 --grey" if section["name"] == "mlp" else ", --size N, and --grey for grey images"
    assert str(caught.value).endswith(f"Add --network {shlex.quote(text)}{form}")
    assert load_network(path, parse_name(text, Form.images(1, 32, 7)))[1].name == section["name"]


@pytest.mark.parametrize("section", [None, "no JSON", "[]", "{}", "3"])
def test_files_of_anyone_ask_for_a_name(tmp_path, section):
    path = tmp_path / "a.safetensors"
    write_state(path, {"w": torch.ones(1)}, **({} if section is None else {"network": section}))
    with pytest.raises(UserError, match=r"Add --network NAME\[:KEY=VALUE,\.\.\.\], --size N, and --grey for grey images$"):
        load_network(path)


@pytest.mark.parametrize(
    "message",
    [
        *("", "[]", "3", "{}", '{"name": "conv6"}'),
        '{"name": 3, "options": {}, "channels": 3, "size": 8, "classes": 7}',
        '{"name": "conv6", "options": [], "channels": 3, "size": 8, "classes": 7}',
        '{"name": "conv6", "options": {}, "channels": "3", "size": 8, "classes": 7}',
    ],
)
def test_metadata_that_names_no_network(tmp_path, message):
    write_state(tmp_path / "a.safetensors", {"w": torch.ones(1)}, built_as=message)
    with pytest.raises(UserError, match=r"its metadata 'built_as' is not a valid network's name\. Add --network"):
        load_network(tmp_path / "a.safetensors")


OWN = {"name": "torchvision.models:squeezenet1_1"}


@pytest.mark.parametrize("options", [{"of": OWN, "at": "features.5"}, {"of": {"name": "mlp"}, "head": OWN},
                                     {"of": {"name": "split", "of": OWN}}])  # fmt: skip
def test_a_file_does_not_say_what_is_imported_however_deep(tmp_path, options):
    built_as = json.dumps({"name": "split", "options": options, "channels": 3, "size": 32, "classes": 7})
    path = tmp_path / "a.safetensors"
    write_state(path, {"w": torch.ones(1)}, built_as=built_as)
    with pytest.raises(UserError, match=r"has the network 'torchvision.models:squeezenet1_1' of another package") as caught:
        load_network(path)
    text = str(caught.value).split("add --network ")[1]
    [word] = shlex.split(text)  # as a shell reads it
    assert parse_name(word, Form.images(3, 32, 7)) == NetworkName("split", options, Form.images(3, 32, 7))


def test_files_that_cannot_be_read(tmp_path):
    name = parse_name("conv6", Form.images(3, 32, 7))
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"nothing of the kind")
    for given in (None, name):
        with pytest.raises(UserError, match=r"none\.safetensors: the file does not exist"):
            load_network(tmp_path / "none.safetensors", given)
        with pytest.raises(UserError, match=r"the file does not exist"):
            load_network(tmp_path, given)
        with pytest.raises(UserError, match=r"bad\.safetensors: is not a readable safetensors file"):
            load_network(bad, given)
    saved(bad)
    bad.write_bytes(bad.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"is not a readable safetensors file"):
        load_network(bad)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"head.bias": torch.ones(8)}, r"tensor 'head\.bias' is \[8\], takes \[7\]"),
        ({"head.extra": torch.ones(2, 3)}, r"tensor 'head\.extra' \[2, 3\] is unknown"),
        ({"head.bias": torch.full((7,), float("nan"))}, r"tensor 'head\.bias' has NaN or infinite values"),
        (
            {"extractor.1.running_var": torch.full((16,), float("inf"))},
            r"tensor 'extractor\.1\.running_var' has NaN or infinite",
        ),
        ({"head.bias": torch.full((7,), 1e300, dtype=torch.float64)}, r"tensor 'head\.bias' has NaN or infinite"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, changes, line):
    path = tmp_path / "a.safetensors"
    saved(path, **changes)
    with pytest.raises(UserError, match=line) as caught:
        load_network(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


MISFITS = [
    ("mlp:widths=[12]", (1, 16, 10), "mlp:widths=[12]", (3, 32, 10),
     "tensor 'extractor.1.weight' is [12, 256], takes [12, 3072]; that is mlp for images of 3 x 32 x 32 with 10 outputs. "
     "The file fits images of 1 x 16 x 16 with 10 outputs: use --size 16, and add --grey"),
    ("lenet", (3, 28, 7), "lenet", (3, 32, 10),
     "The file fits images of 3 x 28 x 28 with 7 outputs: use --size 28, and name its outputs with --classes, or use a "
     "--probe domain of 7 classes"),
    ("conv6", (3, 32, 10), "conv6", (1, 32, 10), "The file fits images of 3 x 32 x 32 with 10 outputs: leave --grey out"),
    ("mlp:widths=[12]", (3, 8, 10), "mlp:widths=[9]", (3, 8, 10),
     "tensor 'extractor.1.weight' is [12, 192], takes [9, 192]; that is mlp for images of 3 x 8 x 8 with 10 outputs; "
     "correct the options in --network NAME[:KEY=VALUE,...], or the form with --size N, and --grey for grey images"),
    ("mlp:widths=[12,8]", (3, 8, 10), "mlp:widths=[12]", (3, 8, 10),
     "if the file's network is not mlp with these options, add --network"),
    ("lenet", (3, 32, 10), "mlp", (3, 32, 10), "if the file's network is not mlp with these options, add --network"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "form", "stated", "other", "line"), MISFITS)
def test_an_error_says_whether_network_options_or_form_are_wrong(tmp_path, text, form, stated, other, line):
    built = parse_name(text, Form.images(*form)).build()
    initialise(built, torch.Generator().manual_seed(0))
    write_state(tmp_path / "a.safetensors", built.state_dict())
    with pytest.raises(UserError) as caught:
        load_network(tmp_path / "a.safetensors", parse_name(stated, Form.images(*other)))
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert ("not mlp with these options" in str(caught.value)) is line.startswith("if the file's")


def test_a_file_whose_own_metadata_are_wrong_is_damaged(tmp_path):
    wrong: dict[str, Any] = {"head.bias": torch.ones(8)}
    saved(tmp_path / "a.safetensors", **wrong)
    with pytest.raises(UserError, match=r"the file says that it is conv6 .* with 7 outputs, so it is damaged"):
        load_network(tmp_path / "a.safetensors")


def test_a_missing_tensor_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    saved(path)
    state = read_state(path)
    del state["extractor.1.weight"]
    write_state(path, state, **read_metadata(path))
    with pytest.raises(UserError, match=r"tensor 'extractor\.1\.weight' \[16\] is missing"):
        load_network(path)


def test_equal_states_are_equal_files(tmp_path: Path):
    """safetensors writes metadata in an order that differs from one process to the next, and within one."""
    state = {"a": torch.randn(3, 2), "b.ü": torch.arange(5), "c": torch.zeros(0)}
    files = set()
    for place in range(20):
        write_state(tmp_path / f"{place}.safetensors", state, network='{"n": "ü"}', display_name="x", other="1")
        files.add((tmp_path / f"{place}.safetensors").read_bytes())
    assert len(files) == 1
    found = read_state(tmp_path / "0.safetensors")
    assert found.keys() == state.keys() and all(torch.equal(found[name], one) for name, one in state.items())
    assert read_metadata(tmp_path / "0.safetensors")["network"] == '{"n": "ü"}'


class Small(nn.Module):
    """A user's network, with a counter of BatchNorm and the head in the middle of the names."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, hidden), nn.BatchNorm1d(hidden))
        self.answer = nn.ModuleDict({"last": nn.Linear(hidden, classes)})
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer["last"](self.model(x) * self.scale)


@pytest.mark.parametrize("wrapped", ["", "module.", "_orig_mod.", "module._orig_mod.", "model."])
@pytest.mark.parametrize("checkpoint", [None, "state_dict", "model_state_dict"])
def test_users_files_of_torch(tmp_path: Path, wrapped: str, checkpoint: str | None):
    torch.manual_seed(0)
    theirs = Small(5, 7).eval()
    state = {f"{wrapped}{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save({checkpoint: state, "epoch": 3} if checkpoint else state, tmp_path / "net.pt")
    name = NetworkName(f"{__name__}:Small", {"hidden": 5}, Form.images(3, 8, 7))
    network, _ = load_network(tmp_path / "net.pt", name)
    images = torch.randn(4, 3, 8, 8)
    assert torch.equal(network(images), theirs(images))
    write_state(tmp_path / "net.safetensors", state)
    assert torch.equal(load_network(tmp_path / "net.safetensors", name)[0](images), theirs(images))


def test_users_files_of_torch_that_are_refused(tmp_path: Path):
    path, name = tmp_path / "net.pt", parse_name("torchvision:resnet18", Form.images(3, 32, 7))
    for content, line in (
        (Small(5, 7), r"net.pt cannot be loaded; save only the weights: torch.save"),
        ({"epoch": 3}, r"net.pt has no state_dict of dense tensors; save one"),
        ({"fc.weight": torch.ones(7, 512)}, r"net.pt: tensor 'conv1.weight' .* is missing; if the file's network is not"),
    ):
        torch.save(content, path)
        with pytest.raises(UserError, match=line):
            load_network(path, name)
    with pytest.raises(UserError, match=r"net.pt: does not name its network .* Add --network"):
        load_network(path)
    torch.save(parse_name("torchvision:resnet18", Form.images(3, 32, 7)).build().state_dict(), path)
    assert load_network(path, name)[1] == name
