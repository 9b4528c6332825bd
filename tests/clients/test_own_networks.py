"""Networks from outside: torch modules and functions of the user's own, other packages' specifications, what is refused."""

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from fedloom.clients.data.form import Form
from fedloom.clients.networks import (
    Network,
    NetworkName,
    architecture_of,
    initialise,
    load_network,
    parse_name,
    save_network,
)
from fedloom.clients.networks.initial import initial_state
from fedloom.conf import Config, UserError, load
from fedloom.conf.randomness import torch_generator
from fedloom.server.run.checks import check

MODULE = '''
from dataclasses import dataclass

import torch
from torch import nn

from fedloom.clients.networks import Network, NetworkSpec
from fedloom.conf.typed import option


class TinyNet(nn.Module):
    """Batch norm, a constant in a buffer, a bare parameter, an attention layer, and a head that is not registered last."""

    def __init__(self, hidden: int, num_classes: int, in_channels: int = 1, size: int = 8) -> None:
        super().__init__()
        self.classifier = nn.Linear(hidden, num_classes)
        self.scale = nn.Parameter(torch.randn(hidden))
        self.register_buffer("middle", torch.full((1,), 0.5))
        self.body = nn.Sequential(nn.Conv2d(in_channels, hidden, 3), nn.BatchNorm2d(hidden), nn.ReLU())
        self.attention = nn.MultiheadAttention(hidden, 1, batch_first=True)

    def forward(self, x):
        x = self.body(x - self.middle).flatten(2).transpose(1, 2)
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.classifier(x.mean(1) * self.scale)


class TwoModes(nn.Module):
    """One that answers otherwise while it is trained."""

    def __init__(self, classes, kind):
        super().__init__()
        self.kind, self.norm, self.head = kind, nn.BatchNorm2d(1), nn.Linear(64, classes)

    def forward(self, x):
        x = self.seen = self.norm(x).flatten(1)
        x = self.head(x)
        if not self.training or self.kind == "one":
            return x
        return {"pair": (x, x), "named": {"out": x}, "wider": torch.cat([x, x], 1)}[self.kind]


def changing(classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(int(torch.randint(3, 900, ()))), nn.LazyLinear(classes))


def lazy(classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(12), nn.Tanh(), nn.LazyLinear(classes))


def linear(channels, size, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))


def others(**given):
    return linear(1, 8, given["num_classes"])


def soft(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes), nn.Softmax(1))


def convolutional(classes):
    return nn.Sequential(nn.Conv2d(1, classes, 8), nn.Flatten())


def fixed():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))


def colour(classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, classes))


def twice(classes):
    layer = nn.Linear(classes, classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes), layer, layer)


def pair(classes):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, classes)

        def forward(self, x):
            return self.layer(x.flatten(1)), x

    return Two()


def nothing(classes):
    return None


def kept(classes, kind, fill):
    """A head with a buffer beside it."""
    network = linear(1, 8, classes)
    network.register_buffer("mask", torch.full((4,), fill, dtype=getattr(torch, kind)))
    return network


class Extra(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(64, classes)

    def get_extra_state(self):
        return {"any": "thing"}

    def set_extra_state(self, state): ...

    def forward(self, x):
        return self.head(x.flatten(1))


def frozen(classes):
    return linear(1, 8, classes).requires_grad_(False)


def leaving(classes):
    raise SystemExit(0)


def failing(classes):
    raise RuntimeError("no weights here\\nsecond line")


made = linear(1, 8, 10)
number = 3


@dataclass(frozen=True)
class Spec(NetworkSpec):
    hidden: int = option(5, "width", low=1)

    def build(self, form):
        extractor = nn.Sequential(nn.Flatten(), nn.Linear(form.numbers, self.hidden))
        return Network(extractor, nn.Linear(self.hidden, form.outputs))


@dataclass(frozen=True)
class LeavingSpec(NetworkSpec):
    def build(self, form):
        raise SystemExit(0)


@dataclass(frozen=True)
class Bare(NetworkSpec):
    def build(self, form):
        return nn.Linear(3, 3)
'''


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package outside of this project, in a folder on the search path."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "nets.py").write_text(MODULE)
    (tmp_path / "my_package" / "broken.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "my_package" / "leaving.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("my_package")]:
        del sys.modules[name]


def of(name: str, *words: str) -> Config:
    return load("digits", [f"network={{name: '{name}'}}", "data.size=8", *words])


def built(name: str, *words: str) -> Network:
    return architecture_of(of(name, *words)).build()


def test_a_module_of_the_user_is_an_extractor_and_a_head():
    network = built("my_package.nets:TinyNet", "network.hidden=4")
    assert isinstance(network.head, nn.Linear) and network.head.in_features == 4
    names = set(network.state_dict())
    assert {"head.weight", "head.bias", "extractor.scale", "extractor.middle", "extractor.body.0.weight"} < names
    assert all(name.startswith(("extractor.", "head.")) for name in names)
    assert not any("classifier" in name for name in names)
    assert "extractor.body.1.running_var" in names and "extractor.body.1.num_batches_tracked" not in names
    copied = copy.deepcopy(network)
    copied.load_state_dict({name: tensor + 1 for name, tensor in network.state_dict().items()})
    assert torch.equal(copied.state_dict()["extractor.scale"], network.state_dict()["extractor.scale"] + 1)
    assert network(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert built("my_package.nets:TinyNet", "network.hidden=4", "data.grey=false")(torch.zeros(3, 3, 8, 8)).shape == (3, 10)


@pytest.mark.parametrize("name", ["lazy", "linear", "others", "Spec", "torch.nn"])
def test_functions_and_specifications_of_other_packages_build_networks(name: str):
    if name == "torch.nn":
        name, words = "torchvision.models:resnet18", ["data.grey=false", "data.size=32"]
    else:
        name, words = f"my_package.nets:{name}", []
    network = built(name, *words)
    channels, size = (3, 32) if words else (1, 8)
    assert network.eval()(torch.zeros(2, channels, size, size)).shape == (2, 10)
    assert isinstance(copy.deepcopy(network), Network)


def test_it_starts_as_its_own_code_says_from_the_seed_and_leaves_torchs_generator_alone():
    config = of("my_package.nets:TinyNet", "network.hidden=4")
    network = architecture_of(config).build()
    before = torch.get_rng_state()
    first, again = initial_state(config), initial_state(config)
    other = initial_state(of("my_package.nets:TinyNet", "network.hidden=4", "seed=1"))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["extractor.scale"], other["extractor.scale"])
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert torch.equal(first["extractor.middle"], torch.tensor([0.5]))
    initialise(network, torch_generator(3))
    assert torch.equal(network.state_dict()["extractor.middle"], torch.tensor([0.5]))


def test_a_network_that_is_another_one_each_time_it_is_made_is_refused():
    config = of("my_package.nets:changing")
    with pytest.raises(
        UserError, match=r"'my_package\.nets:changing' has a different 'extractor\.1\.weight' each time it is made"
    ):
        initialise(architecture_of(config).build(), torch_generator(1))


@pytest.mark.parametrize(
    "name, words, message",
    [
        ("soft", [], r"'my_package.nets:soft' does not end with a linear layer"),
        ("convolutional", [], r"does not end with a linear layer \(torch\.nn\.Linear\)"),
        ("twice", [], r"does not end with a linear layer"),
        (
            "fixed",
            [],
            r"returns \[2, 7\] for 2 examples \(images of 1 x 8 x 8\), must return \[2, 10\]; add a parameter `classes`",
        ),
        ("pair", [], r"returns a tuple for 2 examples"),
        (
            "colour",
            [],
            r"fails on images of 1 x 8 x 8 \(RuntimeError: .*3 channels.*\); data\.size and data\.grey \(fuse, align: --",
        ),
        ("nothing", [], r"returned a NoneType; it must return a torch\.nn\.Module"),
        ("failing", [], r"network: 'my_package.nets:failing' failed \(RuntimeError: no weights here\)"),
        ("kept", ["network.kind=bool", "network.fill=1"], r"'extractor\.mask' of the type torch\.bool, .*persistent=False"),
        ("kept", ["network.kind=uint8", "network.fill=1"], r"'extractor\.mask' of the type torch\.uint8, which"),
        ("Extra", [], r"stores more than tensors in 'extractor\._extra_state' \(get_extra_state\)"),
        ("frozen", [], r"has no trainable weights"),
        ("leaving", [], r"network: 'my_package.nets:leaving' failed \(SystemExit: 0\)"),
        ("LeavingSpec", [], r"network: LeavingSpec\.build failed \(SystemExit: 0\)"),
        ("TinyNet", [], r"network\.hidden: missing; 'my_package\.nets:TinyNet' needs it"),
        ("TinyNet", ["network.hiden=4"], r"unknown option of .* 'network\.hiden'; did you mean 'network\.hidden'\?"),
        ("Spec", ["network.hiden=4"], r"unknown key 'network\.hiden'; did you mean 'network\.hidden'\?"),
        ("Spec", ["network.hidden=0"], r"network\.hidden: got 0, takes a number of at least 1"),
        ("Bare", [], r"Bare\.build returned a Linear; it must return a fedloom\.clients\.networks\.Network"),
        ("made", [], r"network\.name: 'my_package\.nets:made' is a module; it must be"),
        ("number", [], r"has the type int; it must be a class derived from torch\.nn\.Module or a function"),
        ("TineNet", [], r"network\.name: 'my_package\.nets:TineNet' has no 'TineNet'; did you mean 'TinyNet'\?"),
    ],
)
def test_what_cannot_be_fitted_is_reported_in_one_line(name: str, words: list[str], message: str):
    with pytest.raises(UserError, match=message) as caught:
        built(f"my_package.nets:{name}", *words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["kind=float32", "fill=-.inf"],
            r"'my_package\.nets:kept': tensor 'extractor\.mask' has entries that are not finite",
        ),
        (["kind=float32", "fill=1e30"], r"'extractor\.mask' has an entry of size 1e\+30, beyond 2\*\*30, so it cannot"),
        (["kind=int64", "fill=3"], r"^network: 'extractor\.mask' holds whole numbers, .*persistent=False"),
    ],
)
def test_what_cannot_be_summed_is_refused_before_anything_starts(words: list[str], message: str):
    own = [f"network.{word}" for word in words]
    with pytest.raises(UserError, match=message):
        check(of("my_package.nets:kept", "objective.mode=fedavg", "sites=[{domain: digits, count: 2}]", *own))


@pytest.mark.parametrize("words", [["network.widths=[1000000000]"], ["data.classes=1000000000000"]])
def test_a_network_that_no_memory_holds_is_refused(words: list[str]):
    with pytest.raises(UserError, match=r"^network: needs \d+ GiB for its weights, but this machine has \d+ GiB"):
        architecture_of(load("digits", ["network={name: mlp, widths: [100]}", "data.size=32", *words])).build()
    with pytest.raises(UserError, match=r"^network: .*failed \(\w+: "):
        architecture_of(load("digits", ["network={name: mlp, widths: [4000000000000000000]}"])).build()


@pytest.mark.parametrize(
    "name, message",
    [
        ("my_package.net:TinyNet", r"^network\.name: cannot find module 'my_package\.net' \(of 'my_package\.net:TinyNet'\)"),
        ("no_package.nets:TinyNet", r"^network\.name: cannot find module 'no_package' .*; install it, or start fedloom in"),
        (
            "my_package.broken:TinyNet",
            r"'my_package\.broken' cannot be imported \(ModuleNotFoundError: .*a_module_that_nobody",
        ),
        ("my_package.leaving:Net", r"'my_package\.leaving' cannot be imported \(SystemExit: 0\)"),
        ("my_package.nets.TinyNet", r"unknown network 'my_package\.nets\.TinyNet'"),
        ("my_package.nets:", r"unknown network"),
        ("conv7", r"unknown network 'conv7'; did you mean 'conv6'\?"),
    ],
)
def test_a_name_that_leads_nowhere_is_reported_in_one_line(name: str, message: str):
    with pytest.raises(UserError, match=message):
        built(name)


def test_a_network_of_the_user_in_a_file_is_built_where_it_is_named_and_not_because_the_file_says_so(tmp_path: Path):
    name = parse_name("my_package.nets:TinyNet:hidden=4", Form.images(1, 8, 10))
    assert name == NetworkName("my_package.nets:TinyNet", {"hidden": 4}, Form.images(1, 8, 10))
    network = name.build()
    initialise(network, torch_generator(0))
    save_network(tmp_path / "net.safetensors", network, name)
    again, _ = load_network(tmp_path / "net.safetensors", name)
    assert torch.equal(again.state_dict()["extractor.scale"], network.state_dict()["extractor.scale"])
    with pytest.raises(UserError, match=r"If you trust it, add --network my_package\.nets:TinyNet:hidden=4"):
        load_network(tmp_path / "net.safetensors")


@pytest.mark.parametrize("kind, given", [("pair", "a tuple"), ("named", "a dict"), ("wider", r"\[2, 128\]")])
def test_a_network_that_answers_otherwise_in_training_mode_is_refused_before_the_run(kind: str, given: str):
    message = rf"passes {given} to its last layer in training mode, but \[2, 64\] in evaluation mode; its forward must"
    with pytest.raises(UserError, match=message):
        built("my_package.nets:TwoModes", f"network.kind={kind}")


def test_what_is_looked_at_in_training_mode_leaves_no_trace():
    network = built("my_package.nets:TwoModes", "network.kind=one")
    buffers = dict(network.named_buffers())
    assert int(buffers["extractor.norm.num_batches_tracked"]) == 0 and not buffers["extractor.norm.running_mean"].any()
    assert not network.extractor.norm.training  # type: ignore[union-attr]


def test_googlenet_says_what_to_set():
    words = ["data.grey=false", "data.size=32", "network.init_weights=false"]
    with pytest.raises(
        UserError, match=r"passes a GoogLeNetOutputs to its last layer in training mode, .*; set network\.aux_logits=false"
    ):
        built("torchvision.models:googlenet", *words)
    assert built("torchvision.models:googlenet", *words, "network.aux_logits=false")
