"""Augmentations: drawn from the run's seed for each image, and for nothing else."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.clients.data import Form, site_examples, to_float
from fedloom.clients.objectives import resolve
from fedloom.clients.training.augmentation import augmentation_of, check_augmentation
from fedloom.clients.training.learner import batches
from fedloom.conf import Config, UserError, load
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import TrainingConfig

CPU = torch.device("cpu")
SHIFTED = "training.augment=[{name: RandomCrop, size: 8, padding: 2}, RandomHorizontalFlip]"


def configured(*words: str) -> Config:
    return load("digits", ["sites=[{domain: digits, count: 2, samples: 40}]", "data.size=8", "training.batch=16", *words])


def seen(config: Config, round: int = 1, site: int = 0) -> Tensor:
    """All images that a site trains on in a round, in the order of its steps."""
    one = config.roster[site]
    return torch.cat([images for _, images, _ in batches(site_examples(config, one), resolve(config), one, round, CPU)])


def augmented(images: Tensor, *augment: Any, seed: int = 0) -> Tensor:
    made = augmentation_of(TrainingConfig(augment=[*augment]))
    assert made
    return made(images, torch_generator(seed, "test"))


def test_a_site_and_a_round_draw_their_own_and_always_the_same():
    config = configured(SHIFTED)
    first = seen(config)
    torch.rand(7)  # whatever else is drawn
    assert torch.equal(seen(config), first)
    for other in (seen(config, round=2), seen(config, site=1), seen(configured(SHIFTED, "seed=1"))):
        assert other.shape == first.shape and not torch.equal(other, first)


def test_global_randomness_is_neither_used_nor_moved():
    before = torch.get_rng_state()
    first = seen(configured(SHIFTED))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(seen(configured(SHIFTED)), first)


def test_without_augmentations_or_with_those_that_change_nothing_images_are_as_they_were():
    plain = seen(configured())
    assert torch.equal(seen(configured("training.augment=[Identity]")), plain)
    nothing = "training.augment=[{name: RandomHorizontalFlip, p: 0.0}, {name: RandomCrop, size: 8}]"
    assert torch.equal(seen(configured(nothing)), plain)
    flipped = configured("training.augment=[Identity]", "sites.0.flip=true")
    assert torch.equal(seen(flipped), seen(configured("sites.0.flip=true")))


def test_every_image_of_a_batch_has_draws_of_its_own():
    same = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8).repeat(200, 1, 1, 1)
    found = augmented(same, {"name": "RandomHorizontalFlip", "p": 0.25})
    mirrored = (found == to_float(same).flip(-1)).flatten(1).all(1)
    straight = (found == to_float(same)).flatten(1).all(1)
    assert bool((mirrored ^ straight).all()) and 20 < int(mirrored.sum()) < 80


def test_floats_from_0_to_1_become_what_pixels_become():
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    found = augmented(images, {"name": "ToDtype", "dtype": "float32", "scale": True})
    torch.testing.assert_close(found, to_float(images), rtol=0, atol=1e-6)


def test_sections_inside_sections_and_torchvisions_own_kinds_of_options():
    images = torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8)
    section = {"name": "RandomApply", "p": 1.0, "transforms": [{"name": "RandomRotation", "degrees": [90, 90]}]}
    assert torch.equal(augmented(images, section), to_float(images).rot90(1, (-2, -1)))
    turned = augmented(images, {"name": "RandomRotation", "degrees": 20, "interpolation": "bilinear"})
    assert not torch.equal(turned, augmented(images, {"name": "RandomRotation", "degrees": 20}))
    assert augmented(images, {"name": "AutoAugment", "policy": "svhn"}).shape == images.shape


@pytest.mark.parametrize(
    ("augment", "line"),
    [
        (["RandomCorp"], r"unknown augmentation 'RandomCorp'; did you mean 'RandomCrop'\?"),
        (["RandomCrop"], r"training\.augment\[0\]\.size: missing; 'RandomCrop' needs it"),
        (["RandomHorizontalFlip", {"name": "RandomCrop", "size": 8, "pading": 2}],
         r"option of 'RandomCrop' 'training\.augment\[1\]\.pading'; did you mean 'training\.augment\[1\]\.padding'\?"),
        ([{"name": "RandomCrop", "size": 32}], r"\[0\]: failed on an image of 1 x 8 x 8 \(ValueError: Required crop"),
        ([{"name": "RandomCrop", "size": 4}], r"training\.augment: changes the shape .* from 1 x 8 x 8 .* to 1 x 4 x 4"),
        ([{"name": "RandomResize", "min_size": 7, "max_size": 10}], r"augment: changes the shape of images from 1 x 8"),
        ([{"name": "RandomHorizontalFlip", "p": 3}], r"augment\[0\]: 'RandomHorizontalFlip' failed with p=3 \(ValueError"),
        ([{"name": "ToDtype", "dtype": "float32"}], r"augment: returns floats from 0 to 255, takes 0 to 1"),
        ([{"name": "ToDtype", "dtype": "float32", "scale": True}, {"name": "Normalize", "mean": [0.5], "std": [0.5]}],
         r"returns floats from -1 to 1, takes 0 to 1"),
        (["ToPILImage"], r"training\.augment: the result is Image, takes images as uint8 or as floats from 0 to 1"),
        ([{"name": "MixUp", "num_classes": 10}], r"training\.augment\[0\]: 'MixUp' mixes images of a batch"),
        ([{"name": "Normalize", "mean": [0.5], "std": [0.5]}], r"Got torch\.uint8\.\); if it needs floats, put"),
        ([3], r"training\.augment\[0\]: got 3, takes a name or a section such as \{name: RandomCrop"),
        ([{"name": "RandomApply", "transforms": "RandomCrop"}], r"augment\[0\]\.transforms: got 'RandomCrop', takes"),
        ([{"name": "RandomRotation", "degrees": 9, "interpolation": "bilinaer"}], r"did you mean 'bilinear'\?"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_to_the_images_is_reported_in_one_line(augment: list[Any], line: str):
    with pytest.raises(UserError, match=line) as caught:
        check_augmentation(augmentation_of(TrainingConfig(augment=augment)), Form.images(1, 8, 10))
    assert "\n" not in str(caught.value)
