"""Augmentations of training examples, by their names in torchvision.transforms.v2."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.clients.data import to_float
from fedloom.clients.data.form import IMAGE, Form
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.plugins import call, error_summary
from fedloom.conf.randomness import drawing, torch_generator
from fedloom.conf.registry import section_of
from fedloom.conf.schema import TrainingConfig

WHERE = "training.augment"
OF_BATCHES = ("CutMix", "MixUp")
SLACK = 0.5  # how far noise may exceed the range 0 to 1
TRIALS = 16  # enough images for a transform that changes sizes at random to change one
Transform = Callable[[Any], Any]


class Augmentation:
    """A sequence of transforms. They take uint8 images and return uint8, or floats from 0 to 1, as in torchvision."""

    def __init__(self, transforms: Mapping[str, Transform]) -> None:
        self._transforms = transforms

    def __call__(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """Augment uint8 images [n, c, h, w] on the CPU, each with its own random draws. Returns float32 in [-1, 1].

        All draws come from `generator`; torch's own generators stay unchanged. Raises UserError for a transform that fails
        or changes the images' shape.
        """
        seed = int(torch.randint(2**62, (), generator=generator))
        with drawing(seed):
            images = torch.stack([self._one(image) for image in pixels])
        return to_float(images) if images.dtype == torch.uint8 else images.to(torch.float32).mul_(2.0).sub_(1.0)

    def _one(self, pixels: Tensor) -> Tensor:
        image: Any = pixels
        for where, transform in self._transforms.items():
            try:
                image = transform(image)
            except Exception as error:
                hint = (
                    "" if _floats(image) else "; if it needs floats, put {name: ToDtype, dtype: float32, scale: true} first"
                )
                raise UserError(f"{where}: failed on an image of {_shape(pixels)} ({error_summary(error)}){hint}") from error
        if not isinstance(image, Tensor) or not (image.dtype == torch.uint8 or _floats(image)):
            got = image.dtype if isinstance(image, Tensor) else type(image).__name__
            raise UserError(f"{WHERE}: the result is {got}, takes images as uint8 or as floats from 0 to 1")
        if image.shape != pixels.shape:
            raise UserError(f"{WHERE}: changes the shape of images from {_shape(pixels)} (data.size, data.grey) to "
                            f"{_shape(image)}; it must stay the same")  # fmt: skip
        return image.as_subclass(Tensor)


def augmentation_of(training: TrainingConfig) -> Augmentation | None:
    """Return the configured augmentations, or None without any. Raises UserError for unknown names and options."""
    return Augmentation(dict(_transforms(training.augment, WHERE))) if training.augment else None


def check_augmentation(augmentation: Augmentation | None, form: Form) -> None:
    """Raise UserError for augmentations of other data than images, that fail on images of this form or change it."""
    if augmentation:
        form.takes(IMAGE, what=WHERE)
        generator = torch_generator(0, "augmentation", "trial")
        trial = torch.randint(256, (TRIALS, *form.shape), generator=generator).to(torch.uint8)
        least, most = ((float(bound) + 1.0) / 2.0 for bound in augmentation(trial, generator).aminmax())
        if not (least >= -SLACK and most <= 1.0 + SLACK):
            raise UserError(f"{WHERE}: returns floats from {least:.3g} to {most:.3g}, takes 0 to 1. Use ToDtype with "
                            "scale: true, and remove Normalize (networks receive 0 to 1 as -1 to 1)")  # fmt: skip


def _transforms(entries: Any, where: str) -> list[tuple[str, Transform]]:
    if not isinstance(entries, list):
        raise UserError(f"{where}: got {entries!r}, takes a list such as [RandomHorizontalFlip]")
    return [(f"{where}[{index}]", _transform(entry, f"{where}[{index}]")) for index, entry in enumerate(entries)]


def _transform(entry: Any, where: str) -> Transform:
    from torchvision.transforms import v2  # imports torch's compiler

    section = section_of(entry, where, "{name: RandomCrop, size: 32, padding: 4}")
    known = [name for name, value in vars(v2).items() if isinstance(value, type) and issubclass(value, v2.Transform)]
    if (name := section.get("name")) not in known:
        raise unknown("augmentation", name, known)
    if name in OF_BATCHES:
        raise UserError(
            f"{where}: '{name}' mixes images of a batch and their labels; an augmentation changes each image alone"
        )
    options = {key: _option(key, item, f"{where}.{key}") for key, item in section.items() if key != "name"}
    return call(getattr(v2, name), options, {}, name, where)


def _option(key: str, value: Any, where: str) -> Any:
    """Convert an option from the configuration to torchvision's type."""
    from torchvision.transforms import v2

    if key == "transforms":
        return [transform for _, transform in _transforms(value, where)]
    kinds: dict[str, Any] = {"interpolation": v2.InterpolationMode, "policy": v2.AutoAugmentPolicy}
    if key in kinds and isinstance(value, str):
        known = {member.value: member for member in kinds[key]}
        if value not in known:
            raise unknown(where, value, known)
        return known[value]
    if key == "dtype" and isinstance(value, str):
        return getattr(torch, value, value)
    return value


def _floats(image: Any) -> bool:
    return isinstance(image, Tensor) and image.dtype.is_floating_point


def _shape(image: Tensor) -> str:
    return " x ".join(map(str, image.shape))
