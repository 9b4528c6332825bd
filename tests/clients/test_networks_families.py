"""Every family of networks: shapes, gradients, tracing, norms, initial weights, options that cannot be."""

import copy

import pytest
import torch
from torch import Tensor, fx, nn

from fedloom.clients.data.form import Form
from fedloom.clients.networks import NetworkName, initialise, parameter_count, parse_name

SLIM = [
    *("conv6", "conv6:norm=batch", "conv6:norm=none,bias=true", "conv6:norm=batch,affine=false,standardise=true"),
    *(
        "vgg11:width=0.125,groups=8",
        "vgg13:width=0.125,norm=batch",
        "vgg16:width=0.125,norm=none",
        "vgg19:width=0.1,norm=batch",
    ),
    *("mlp", "mlp:widths=[20,10],bias=false", "mlp:widths=[]", "lenet", "lenet:width=0.5,bias=false"),
    *("resnet18:width=0.125", "resnet18:width=0.125,norm=group", "resnet34:width=0.125,norm=none"),
    *("resnet20:width=0.5", "resnet20:norm=none,bias=true", "resnet56:width=0.5,norm=group"),
    *("wide_resnet:depth=10,widen=2", "wide_resnet:depth=10,widen=1,norm=group", "wide_resnet:depth=16,widen=1,norm=none"),
]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def network(text: str, channels: int = 3, size: int = 32, seed: int = 0) -> nn.Module:
    """The named network with 7 classes, initialised by the seed."""
    built = parse_name(text, Form.images(channels, size, 7)).build()
    initialise(built, torch.Generator().manual_seed(seed))
    return built


def images(n: int = 4, channels: int = 3, size: int = 32) -> Tensor:
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(0))


class Leaves(fx.Tracer):
    """Every convolution is a leaf, standardised ones too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Conv2d) or super().is_leaf_module(m, module_qualified_name)


@pytest.mark.parametrize("text", SLIM)
def test_logits_gradients_and_head(text):
    built = network(text)
    given = built(images())
    assert given.shape == (4, 7)
    assert torch.isfinite(given).all()
    assert {key.split(".")[0] for key in built.state_dict()} <= {"extractor", "head"}
    assert isinstance(built.head, nn.Linear)
    given.square().sum().backward()
    for name, parameter in built.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert parameter_count(built) == sum(tensor.numel() for tensor in built.parameters() if tensor.requires_grad)


@pytest.mark.parametrize("text", SLIM)
def test_a_few_steps_lower_the_loss_and_reach_every_weight(text):
    built, labels = network(text), torch.tensor([0, 1, 2, 3])
    before = {name: tensor.detach().clone() for name, tensor in built.named_parameters()}
    optimiser = torch.optim.SGD(built.parameters(), lr=0.02, momentum=0.5)
    losses = []
    for _ in range(8):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(built(images()), labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert min(losses[4:]) < losses[0]
    for name, tensor in built.named_parameters():
        assert not torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("text", SLIM)
def test_fx_traces_it_to_the_same_function_of_layers_and_sums(text):
    built = network(text).eval()
    graph = Leaves().trace(built)
    assert {node.op for node in graph.nodes} <= {"placeholder", "call_module", "call_function", "output"}
    modules = dict(built.named_modules())
    kinds = {type(modules[str(node.target)]) for node in graph.nodes if node.op == "call_module"}
    assert all(kind.__module__.startswith("torch.nn") or issubclass(kind, nn.Conv2d) for kind in kinds)
    with torch.inference_mode():
        assert torch.equal(fx.GraphModule(built, graph)(images()), built(images()))


@pytest.mark.parametrize("text", SLIM)
def test_initial_weights_depend_on_the_generator_alone(text):
    torch.manual_seed(1)
    one = network(text, seed=3).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    same, other = network(text, seed=3).state_dict(), network(text, seed=4).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not torch.equal(one["head.weight"], other["head.weight"])


@pytest.mark.parametrize(
    ("text", "names", "first", "last"),
    [
        ("conv6", 20, [-0.13268150, -0.13580695, -0.02953097], [0.09332919, 0.08479072, 0.05298610]),
        ("vgg11", 26, [-0.06634075, -0.06790347, -0.01476548], [-0.04147743, 0.01694360, -0.01684728]),
        ("vgg19", 50, [-0.06634075, -0.06790347, -0.01476548], [0.00179187, 0.03396048, 0.04094942]),
    ],
)
def test_plain_networks_keep_their_names_and_their_draw(text, names, first, last):
    """The numbers are those of the code before there were other norms."""
    state = network(text, channels=1).state_dict()
    assert len(state) == names
    assert list(state)[:3] == ["extractor.0.weight", "extractor.1.weight", "extractor.1.bias"]
    assert state["extractor.0.weight"].flatten()[:3].tolist() == pytest.approx(first, rel=1e-4)
    assert state["head.weight"].flatten()[-3:].tolist() == pytest.approx(last, rel=1e-4)


@pytest.mark.parametrize(
    ("text", "millions"),
    [
        *(("resnet18", 11.17), ("resnet34", 21.28), ("resnet20", 0.273), ("resnet56", 0.857)),
        *(("wide_resnet:depth=16,widen=4", 2.75), ("wide_resnet:depth=28,widen=10", 36.5)),
        *(("lenet", 0.0617), ("mlp", 1.330), ("vgg11:norm=batch,bias=true", 9.23)),
    ],
)
def test_sizes_are_those_of_the_papers(text, millions):
    with torch.device("meta"):
        built = parse_name(text, Form.images(3, 32, 10)).build()
    assert parameter_count(built) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("text", ["conv6:norm=batch", "resnet20:width=0.5", "wide_resnet:depth=10,widen=1"])
def test_batchnorm_starts_fresh_counts_in_training_and_is_fixed_in_evaluation(text):
    built = network(text)
    norms = [module for module in built.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked is not None
        assert torch.equal(norm.weight, torch.ones_like(norm.weight))
        assert not norm.bias.any()
        assert not norm.running_mean.any()
        assert torch.equal(norm.running_var, torch.ones_like(norm.running_var))
        assert norm.num_batches_tracked.item() == 0
    built.train()(images())
    assert {int(norm.num_batches_tracked or 0) for norm in norms} == {1}
    state = copy.deepcopy(built.eval().state_dict())
    with torch.inference_mode():
        whole, alone = built(images()), built(images()[:1])
    assert torch.allclose(whole[:1], alone, atol=1e-5)
    assert all(torch.equal(tensor, state[name]) for name, tensor in built.state_dict().items())


@pytest.mark.parametrize("text", ["resnet18:width=0.125,norm=none", "wide_resnet:depth=10,widen=1,norm=none"])
def test_without_norms_every_branch_starts_at_nothing(text):
    built = network(text)
    blocks = [module for module in built.modules() if hasattr(module, "branch")]
    assert blocks
    for block in blocks:
        assert not block.branch[-1].weight.any()  # type: ignore[index,union-attr]  # branch is a Sequential of convolutions
    assert 0.01 < built(images()).std() < 10


@pytest.mark.parametrize("text", ["conv6", "mlp", "lenet", "resnet20", "wide_resnet:depth=10,widen=1"])
@pytest.mark.parametrize(("channels", "size"), [(1, 16), (3, 28), (1, 33)])
def test_other_sizes_and_channels(text, channels, size):
    assert network(text, channels, size)(images(2, channels, size)).shape == (2, 7)


@pytest.mark.parametrize("text", ["vgg11:norm=batch", "vgg11:norm=none"])
def test_only_groupnorm_asks_for_groups_that_divide(text):
    assert isinstance(parse_name(f"{text},width=0.3", Form.images(3, 32, 7)).build(), nn.Module)


@pytest.mark.parametrize(
    ("text", "size", "line"),
    [
        ("conv6:norm=spectral", 32, r"network\.norm: got 'spectral', takes one of: group, batch, layer, instance, none"),
        ("resnet18:norm=group,groups=7", 32, r"network\.groups: got 7, takes a number that divides every width, such as 64"),
        ("wide_resnet:depth=15", 32, r"network\.depth: got 15, takes 6 n \+ 4"),
        ("wide_resnet:depth=4", 32, r"network\.depth: got 4"),
        ("wide_resnet:widen=0", 32, r"network\.widen: got 0"),
        ("lenet", 15, r"data\.size: got 15, takes at least 16"),
        ("lenet:width=0", 32, r"network\.width: got 0"),
        ("mlp:widths=[10,0]", 32, r"network\.widths: got 0, takes a number of at least 1"),
        ("mlp:widths=wide", 32, r"network\.widths: "),
        ("resnet18:bais=true", 32, r"unknown key 'network\.bais'; did you mean 'network\.bias'\?"),
    ],
)
def test_options_that_cannot_be_are_refused_by_their_key(text, size, line):
    with pytest.raises(ValueError, match=line) as caught:
        parse_name(text, Form.images(3, size, 7)).build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("numbers", "line"),
    [((0, 32, 7), "shape: got 0 x 32 x 32"), ((3, 0, 7), "shape: got 3 x 0 x 0"), ((3, 32, 0), "outputs: got 0")],
)
def test_nothing_is_built_for_no_channels_pixels_or_outputs(numbers, line):
    with pytest.raises(ValueError, match=f"{line}, takes numbers of at least 1"):
        NetworkName("conv6", {}, Form.images(*numbers)).build()
