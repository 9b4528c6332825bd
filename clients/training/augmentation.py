"""Augmentations of training images, by the names that torchvision.transforms.v2 has for them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.clients.data import to_float
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.plugins import call, told
from fedloom.conf.randomness import drawing, torch_generator
from fedloom.conf.registry import section_of
from fedloom.conf.schema import TrainingConfig

WHERE = "training.augment"
CPU = torch.device("cpu")
OF_BATCHES = ("CutMix", "MixUp")
SLACK = 0.5  # by which noise may go beyond 0 and 1
TRIALS = 16  # images, some of which a transform that changes sizes by chance will change
Transform = Callable[[Any], Any]


class Augmentation:
    """Transforms in their order. They see uint8 images and give these, or floats from 0 to 1, as torchvision has them."""

    def __init__(self, transforms: Mapping[str, Transform]) -> None:
        self._transforms = transforms

    def __call__(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """uint8 [n, c, h, w] on the CPU to float32 in [-1, 1], each image with draws of its own, all from the generator.

        torch's own generators stay as they are. Raises UserError for a transform that fails or changes the images' shape.
        """
        seed = int(torch.randint(2**62, (), generator=generator))
        with drawing(seed, CPU):
            images = torch.stack([self._one(image) for image in pixels])
        return to_float(images) if images.dtype == torch.uint8 else images.to(torch.float32).mul_(2.0).sub_(1.0)

    def _one(self, pixels: Tensor) -> Tensor:
        image: Any = pixels
        for where, transform in self._transforms.items():
            try:
                image = transform(image)
            except Exception as error:
                hint = "" if _floats(image) else "; for floats, {name: ToDtype, dtype: float32, scale: true} before it"
                raise UserError(f"{where}: failed on an image of {_shape(pixels)} ({told(error)}){hint}") from error
        if not isinstance(image, Tensor) or not (image.dtype == torch.uint8 or _floats(image)):
            got = image.dtype if isinstance(image, Tensor) else type(image).__name__
            raise UserError(f"{WHERE}: ends in {got}, takes images of uint8 or of floats from 0 to 1")
        if image.shape != pixels.shape:
            raise UserError(f"{WHERE}: makes images of {_shape(pixels)} (data.size, data.grey) ones of {_shape(image)}; "
                            "networks take them in one shape")  # fmt: skip
        return image.as_subclass(Tensor)


def augmentation_of(training: TrainingConfig) -> Augmentation | None:
    """The configured augmentations; None: there are none. UserError for unknown names and options."""
    return Augmentation(dict(_transforms(training.augment, WHERE))) if training.augment else None


def check_augmentation(augmentation: Augmentation | None, channels: int, size: int) -> None:
    """UserError for augmentations that fail on images [channels, size, size], or change their shape."""
    if augmentation:
        generator = torch_generator(0, "augmentation", "trial")
        trial = torch.randint(256, (TRIALS, channels, size, size), generator=generator).to(torch.uint8)
        least, most = ((float(one) + 1.0) / 2.0 for one in augmentation(trial, generator).aminmax())
        if not (least >= -SLACK and most <= 1.0 + SLACK):
            raise UserError(f"{WHERE}: gives floats from {least:.3g} to {most:.3g}, takes them from 0 to 1: ToDtype with "
                            "scale: true, and no Normalize (networks get what is 0 to 1 as -1 to 1)")  # fmt: skip


def _transforms(given: Any, where: str) -> list[tuple[str, Transform]]:
    if not isinstance(given, list):
        raise UserError(f"{where}: got {given!r}, takes a list such as [RandomHorizontalFlip]")
    return [(f"{where}[{place}]", _transform(one, f"{where}[{place}]")) for place, one in enumerate(given)]


def _transform(given: Any, where: str) -> Transform:
    from torchvision.transforms import v2  # imports torch's compiler

    section = section_of(given, where, "{name: RandomCrop, size: 32, padding: 4}")
    known = [name for name, one in vars(v2).items() if isinstance(one, type) and issubclass(one, v2.Transform)]
    if (name := section.get("name")) not in known:
        raise unknown("augmentation", name, known)
    if name in OF_BATCHES:
        raise UserError(f"{where}: '{name}' mixes images of a batch and their labels; here each is changed by itself")
    options = {key: _option(key, item, f"{where}.{key}") for key, item in section.items() if key != "name"}
    return call(getattr(v2, name), options, {}, name, where)


def _option(key: str, given: Any, where: str) -> Any:
    """What torchvision takes where a configuration has a text or a list of sections."""
    from torchvision.transforms import v2

    if key == "transforms":
        return [transform for _, transform in _transforms(given, where)]
    kinds: dict[str, Any] = {"interpolation": v2.InterpolationMode, "policy": v2.AutoAugmentPolicy}
    if key in kinds and isinstance(given, str):
        known = {one.value: one for one in kinds[key]}
        if given not in known:
            raise unknown(where, given, known)
        return known[given]
    if key == "dtype" and isinstance(given, str):
        return getattr(torch, given, given)
    return given


def _floats(image: Any) -> bool:
    return isinstance(image, Tensor) and image.dtype.is_floating_point


def _shape(image: Tensor) -> str:
    return " x ".join(map(str, image.shape))
