"""Networks for other data than square images: features, sequences, tokens, arrays, images of any shape."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedloom.clients.data.form import ARRAY, FEATURES, IMAGE, KINDS, SEQUENCE, TOKENS, Form
from fedloom.clients.networks import NETWORKS, Architecture, NetworkName, initialise, load_network, parse_name, save_network
from fedloom.clients.networks.base import EXTRACTOR, FITTING, HEAD
from fedloom.clients.storage.states import write_state
from fedloom.clients.training.min_batch_size import min_batch_size
from fedloom.conf.errors import UserError
from fedloom.fusion.graph.channels import WiringError, wire
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.submodels import submodel

SEQUENCES = Form(SEQUENCE, (12, 5), 3)
TEXTS = Form(TOKENS, (12,), 4, vocabulary=20)
NEXT_TOKENS = Form(TOKENS, (12,), 20, vocabulary=20, each_step=True)
SIGNALS = Form(SEQUENCE, (12, 5), 2, each_step=True)
ROWS = Form(FEATURES, (6,), 3)
ARRAYS = Form(ARRAY, (3, 4, 2, 2), 2)
SMALL = {"name": "transformer", "width": 16, "heads": 2, "layers": 1, "feed_forward": 24}
CONVOLUTIONS = {"name": "cnn1d", "widths": [8, 8]}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_nets.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    import sys

    sys.modules.pop("my_nets", None)


MINE = """
from torch import nn


class Rows(nn.Module):
    def __init__(self, in_features, n_outputs, width=7):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(in_features, width), nn.ReLU(), nn.Linear(width, n_outputs))

    def forward(self, x):
        return self.layers(x)


class Texts(nn.Module):
    def __init__(self, vocab_size, seq_len, classes):
        super().__init__()
        self.table = nn.Embedding(vocab_size, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, classes)
        self.length = seq_len

    def forward(self, x):
        assert x.shape[1] == self.length
        return self.head(self.states(x))

    def states(self, x):
        return self.lstm(self.table(x))[0]


class LastOfTexts(Texts):
    def states(self, x):
        return super().states(x)[:, -1]


def steps(input_size, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(12 * input_size, num_classes))


def pictures(channels, height, width, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, classes))


def squares(size, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, classes))


def fixed(classes):
    return nn.Sequential(nn.Linear(9, classes))
"""


def built(section: str | dict[str, Any], form: Form, seed: int = 0) -> Any:
    section = {"name": section} if isinstance(section, str) else section
    network = Architecture(json.dumps(section), form).build()
    initialise(network, torch.Generator().manual_seed(seed))
    return network.eval()


def inputs(form: Form, count: int = 5, seed: int = 9) -> Tensor:
    return form.random(count, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["mlp", "cnn1d", "lstm", "transformer"])
@pytest.mark.parametrize("form", [SEQUENCES, TEXTS, NEXT_TOKENS, SIGNALS, ROWS, ARRAYS], ids=str)
def test_outputs_have_the_shape_of_the_form_or_one_line_says_why_not(name: str, form: Form):
    takes = (form.kind != TOKENS) if name == "mlp" else form.kind in (SEQUENCE, TOKENS)
    if not takes or (form.each_step and name in ("mlp", "cnn1d")):
        with pytest.raises(UserError, match=f"network '{name}': ") as caught:
            built(name, form)
        assert "\n" not in str(caught.value)
        return
    network = built(name, form)
    assert network(inputs(form)).shape == ((5, 12, form.outputs) if form.each_step else (5, form.outputs))
    assert all(key.startswith((EXTRACTOR, HEAD)) for key in network.state_dict())
    assert isinstance(network.head, nn.Linear)
    assert min_batch_size(Architecture(json.dumps({"name": name}), form)) == 1


@pytest.mark.parametrize("name", ["mlp", "cnn1d", "lstm", "transformer"])
def test_initial_weights_depend_on_the_generator_only(name: str):
    form = SEQUENCES if name == "mlp" else TEXTS
    torch.manual_seed(1)
    one = built(name, form, seed=3).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    same, other = built(name, form, seed=3).state_dict(), built(name, form, seed=4).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_all_weights_of_torchs_own_attention_are_drawn_from_the_generator():
    def drawn() -> list[Tensor]:
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        initialise(layer, torch.Generator().manual_seed(0))
        return list(layer.state_dict().values())

    assert all(torch.equal(*pair) for pair in zip(drawn(), drawn(), strict=True))


@pytest.mark.parametrize("name", ["cnn1d", "lstm", "transformer"])
def test_padding_does_not_matter(name: str):
    network, shorter = built(name, TEXTS), built(name, replace(TEXTS, shape=(9,)))
    state = network.state_dict()
    if name == "transformer":
        state = {**state, "extractor.positions.weight": state["extractor.positions.weight"][:9]}
    shorter.load_state_dict(state)
    texts = inputs(TEXTS)
    texts[:, 7:] = 0
    texts[0, 3:] = 0
    assert torch.allclose(network(texts), shorter(texts[:, :9]), atol=1e-6)
    assert not torch.allclose(network(texts), network(inputs(TEXTS)), atol=1e-3)
    assert torch.isfinite(network(TEXTS.zeros(2))).all()  # texts without any token


@pytest.mark.parametrize("name", ["lstm", "transformer"])
@pytest.mark.parametrize("form", [NEXT_TOKENS, SIGNALS], ids=str)
def test_outputs_of_a_step_do_not_depend_on_later_steps(name: str, form: Form):
    network, one, other = built(name, form), inputs(form), inputs(form, seed=10)
    other[:, :6] = one[:, :6]
    assert torch.allclose(network(one)[:, :6], network(other)[:, :6], atol=1e-6)
    assert not torch.allclose(network(one)[:, 6:], network(other)[:, 6:], atol=1e-3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("section", [{"name": "mlp"}, CONVOLUTIONS, SMALL])
def test_sites_can_be_trained_together(section: dict[str, Any]):
    network = built(section, SEQUENCES)
    states = {key: torch.stack([tensor, tensor + 0.1]) for key, tensor in network.state_dict().items()}
    x = inputs(SEQUENCES)
    together = vmap(lambda state: functional_call(network, state, (x,)))(states)
    assert torch.allclose(together[0], network(x), atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NETWORKS.names() if name not in ("lstm", "cnn1d", "transformer", "rest")])
def test_images_of_any_shape_and_number_of_channels(name: str):
    width = {"width": 0.1} if "vgg" in name or "resnet" in name else {}
    options = {"widen": 1} if name == "wide_resnet" else {**width, "groups": 8} if "vgg" in name else width
    for shape in ((4, 32, 48), (1, 40, 32), (64, 33, 32)):
        network = built({"name": name, **options}, Form(IMAGE, shape, 7))
        with torch.inference_mode():
            assert network(torch.rand(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", ["conv6", "vgg11", "lenet", "convnet", "resnet20", "wide_resnet"])
def test_networks_for_images_refuse_others_in_one_line(name: str):
    for form in (ROWS, SEQUENCES, TEXTS, ARRAYS):
        with pytest.raises(
            UserError, match=rf"network '{name}': takes inputs of the kind image, but .* \(kind {form.kind}\)"
        ):
            built(name, form)


@pytest.mark.parametrize("form", [SEQUENCES, TEXTS, ROWS, ARRAYS, Form.images(1, 32, 2)], ids=str)
def test_the_networks_that_errors_name_fit(form: Form):
    for name in re.findall(r"\w+", FITTING[form.kind].replace(" to ", ", ")):
        assert built({"name": name, **({"width": 0.1, "groups": 1} if "vgg" in name else {})}, form)


def test_images_that_are_too_small_on_one_side_are_refused():
    with pytest.raises(UserError, match=r"data\.size: got 8 x 40, takes at least 16 for this network"):
        built("lenet", Form(IMAGE, (3, 8, 40), 2))
    with pytest.raises(UserError, match=r"data\.size: got 40 x 2, too small for the network's poolings"):
        built({"name": "convnet", "widths": [4, 4], "pools": [1, 2]}, Form(IMAGE, (3, 40, 2), 2))


@pytest.mark.parametrize(
    ("section", "form", "line"),
    [
        (
            {"name": "transformer", "heads": 3},
            TEXTS,
            r"network\.heads: got 3, takes a number that divides network\.width, 64",
        ),
        ({"name": "cnn1d", "kernel": 4}, TEXTS, r"network\.kernel: got 4, takes an odd number"),
        ({"name": "cnn1d", "widths": []}, TEXTS, r"network\.widths: got none"),
        ({"name": "lstm"}, replace(TEXTS, vocabulary=0), r"network 'lstm': the vocabulary has 0 tokens, takes at least 2"),
    ],
)
def test_options_that_do_not_fit(section: dict[str, Any], form: Form, line: str):
    with pytest.raises(UserError, match=line):
        built(section, form)


@pytest.mark.parametrize("form", [SEQUENCES, NEXT_TOKENS, ROWS, Form(IMAGE, (4, 16, 24), 3)], ids=str)
def test_network_files_hold_the_form(tmp_path: Path, form: Form):
    name = parse_name("transformer:width=8,heads=2" if form.kind in (SEQUENCE, TOKENS) else "mlp:widths=[4]", form)
    network = name.build()
    initialise(network, torch.Generator().manual_seed(0))
    save_network(tmp_path / "net.safetensors", network, name)
    again, known = load_network(tmp_path / "net.safetensors")
    assert known == name and torch.equal(again(inputs(form)), network.eval()(inputs(form)))


def test_files_from_before_forms_load(tmp_path: Path):
    name = NetworkName("conv6", {}, Form.images(3, 16, 7))
    network = built("conv6", name.form)
    old = json.dumps({"name": "conv6", "options": {}, "channels": 3, "size": 16, "classes": 7})
    write_state(tmp_path / "old.safetensors", network.state_dict(), built_as=old)
    assert load_network(tmp_path / "old.safetensors")[1] == name


@pytest.mark.parametrize("change", [{"kind": "film"}, {"shape": [3, 16]}, {"shape": "ab"}, {"outputs": "7"}, {"more": 1}])
def test_a_file_with_a_wrong_form_is_refused(tmp_path: Path, change: dict[str, Any]):
    form = {**Form.images(3, 16, 7).plain(), **change}
    path = tmp_path / "net.safetensors"
    write_state(path, {"w": torch.ones(1)}, built_as=json.dumps({"name": "conv6", "options": {}, "form": form}))
    with pytest.raises(UserError, match="its metadata 'built_as' is not a valid network's name"):
        load_network(path)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("Rows", ROWS),
        ("Texts", NEXT_TOKENS),
        ("LastOfTexts", TEXTS),
        ("steps", SEQUENCES),
        ("pictures", Form(IMAGE, (4, 6, 9), 3)),
        ("squares", Form.images(3, 8, 2)),
    ],
)
def test_own_modules_receive_the_numbers_that_they_take(name: str, form: Form):
    network = built(f"my_nets:{name}", form)
    assert network(inputs(form)).shape == ((5, 12, form.outputs) if form.each_step else (5, form.outputs))
    assert list(network.head.state_dict()) == ["weight", "bias"]
    if name == "Rows":
        assert network.head.in_features == 7  # its own width, not that of an image


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("name", "form", "line"),
    [
        ("Texts", TEXTS, r"returns \[2, 12, 4\] for 2 examples \(12 tokens\), must return \[2, 4\]"),
        ("LastOfTexts", NEXT_TOKENS, r"returns \[2, 20\] for 2 examples \(12 tokens\), must return \[2, 12, 20\]"),
        ("fixed", ROWS, r"'my_nets:fixed' fails on 6 features \("),
        (
            "squares",
            Form(IMAGE, (3, 6, 9), 2),
            r"takes 'size', but the data are images of 3 x 6 x 9; take 'height' and 'width'",
        ),
    ],
)
def test_own_modules_that_do_not_fit(name: str, form: Form, line: str):
    with pytest.raises(UserError, match=line) as caught:
        built(f"my_nets:{name}", form)
    assert "\n" not in str(caught.value)


FUSED = [
    (ROWS, {"name": "mlp", "widths": [16, 8]}, {"name": "mlp", "widths": [16, 16, 8]}),
    (SEQUENCES, CONVOLUTIONS, {"name": "cnn1d", "widths": [8, 8, 8]}),
    (TEXTS, CONVOLUTIONS, {"name": "cnn1d", "widths": [8, 8, 8]}),
    *((form, SMALL, {**SMALL, "layers": 2, "width": 20}) for form in (SEQUENCES, TEXTS, NEXT_TOKENS, SIGNALS)),
]


@pytest.mark.parametrize(("form", "shallow", "deep"), FUSED)
def test_permuted_channels_leave_the_outputs(form: Form, shallow: dict[str, Any], deep: dict[str, Any]):
    network, x = built(deep, form), inputs(form)
    wiring = wire(network, form.zeros(1))
    state = wiring.permuted(network.state_dict(), wiring.permutations(torch.Generator().manual_seed(3)))
    assert any(not torch.equal(tensor, network.state_dict()[key]) for key, tensor in state.items())
    other = built(deep, form, seed=1)
    other.load_state_dict(state)
    assert torch.allclose(other(x), network(x), atol=1e-5)


@pytest.mark.parametrize(("form", "shallow", "deep"), FUSED)
def test_networks_of_two_depths_are_fused(form: Form, shallow: dict[str, Any], deep: dict[str, Any]):
    one, other, probe = built(shallow, form, 1), built(deep, form, 2), inputs(form, 60)
    for weights in ((0.5, 0.5), (1.0, 0.0)):
        fused = fuse([one, other], into=0, depth=1, probe=probe, weights=weights).network
        assert fused(probe).shape == one(probe).shape
        if weights == (1.0, 0.0):  # the shallow network in the deep one's layers
            assert (fused(probe) - one(probe)).std() < 0.1 * one(probe).std()


def test_an_lstm_cannot_be_fused():
    with pytest.raises(
        WiringError, match=r"^recurrent networks such as lstm cannot be fused, .*; use transformer, cnn1d or mlp"
    ):
        wire(built("lstm", SEQUENCES), SEQUENCES.zeros(1))


def test_every_kind_has_a_network():
    forms = {form.kind: form for form in (SEQUENCES, TEXTS, ROWS, ARRAYS, Form.images(1, 8, 2))}
    assert {*forms} == {*KINDS}


def test_a_transformer_of_another_width_is_not_a_part_of_one_but_one_with_fewer_layers_is():
    whole = wire(built({**SMALL, "layers": 2, "feed_forward": 16}, SEQUENCES), SEQUENCES.zeros(1))
    submodel(whole, wire(built({**SMALL, "feed_forward": 8}, SEQUENCES), SEQUENCES.zeros(1)))
    narrow = wire(built({**SMALL, "width": 4, "feed_forward": 16}, SEQUENCES), SEQUENCES.zeros(1))
    with pytest.raises(
        UserError, match=r"attention and grouped layers take equal widths, but .*; vary other options, such as"
    ):
        submodel(whole, narrow)
