"""Random generators, batches of images, and what every image becomes."""

import numpy as np
import pytest
import torch
from torchvision.transforms.functional import rotate as torchvision_rotate

from fedloom.clients import data
from fedloom.clients.data.cache import ExampleCache
from fedloom.clients.data.examples import Examples
from fedloom.clients.data.transforms import Change, render, rotate
from fedloom.conf.randomness import generator, torch_generator


def test_generators_depend_on_seed_and_words_alone() -> None:
    assert generator(1, "a", "b").random() == generator(1, "a", "b").random()
    others = [generator(2, "a", "b"), generator(1, "b", "a"), generator(1, "ab"), generator(1, "a"), generator(1)]
    assert len({g.random() for g in [*others, generator(1, "a", "b"), generator(1, "a", 1), generator(1, "a", "1")]}) == 8
    draws = [torch.rand(1, generator=torch_generator(1, *words)).item() for words in (["a"], ["a"], ["b"])]
    assert draws[0] == draws[1] != draws[2]


def test_to_float_spans_minus_one_to_one() -> None:
    x = data.to_float(torch.tensor([0, 51, 255], dtype=torch.uint8))
    assert x.dtype == torch.float32
    torch.testing.assert_close(x, torch.tensor([-1.0, -0.6, 1.0]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_random_flip_mirrors_about_half_of_the_images(dtype: torch.dtype) -> None:
    x = torch.arange(1000 * 6).reshape(1000, 1, 2, 3).remainder(251).to(dtype)
    before = x.clone()
    flipped = data.random_flip(x, torch_generator(0, "flip"))
    same = (flipped == x).flatten(1).all(1)
    mirrored = (flipped == x.flip(-1)).flatten(1).all(1)
    assert (same ^ mirrored).all() and 400 < int(mirrored.sum()) < 600
    assert flipped.dtype == dtype and torch.equal(x, before)


def test_cache_keeps_the_newest_within_its_bytes() -> None:
    def make(n: int) -> Examples:
        return Examples(torch.zeros(n, 1, 4, 4, dtype=torch.uint8), torch.zeros(n, dtype=torch.int64))

    cache = ExampleCache(limit=5 * 24)
    first = cache.get("a", lambda: make(2))
    assert cache.get("a", lambda: make(9)) is first
    cache.get("b", lambda: make(3))
    assert cache.get("a", lambda: make(9)) is first and cache.nbytes == 5 * 24
    cache.get("c", lambda: make(1))  # "b" was used least recently
    assert cache.get("a", lambda: make(9)) is first and cache.nbytes == 3 * 24
    huge = cache.get("d", lambda: make(100))
    assert cache.get("d", lambda: make(1)) is huge and cache.nbytes == 100 * 24


@pytest.fixture
def pixels() -> np.ndarray:
    return generator(0, "pixels").integers(0, 256, (7, 16, 16), dtype=np.uint8)


def test_render_without_changes_is_the_identity(pixels: np.ndarray) -> None:
    for rotation in (0.0, 360.0, -360.0):
        assert np.array_equal(render(pixels, Change((16, 16), True, rotation))[:, 0], pixels)


@pytest.mark.parametrize("size", [15, 16])
def test_quarter_turns_are_exact_and_counter_clockwise(pixels: np.ndarray, size: int) -> None:
    square = np.ascontiguousarray(pixels[:, :size, :size])
    turned = render(square, Change((size, size), True, 90.0))[:, 0]
    assert np.array_equal(turned, np.rot90(square, 1, (1, 2)))
    for _ in range(3):
        turned = render(turned.numpy(), Change((size, size), True, 90.0))[:, 0]
    assert np.array_equal(turned, square)


@pytest.mark.parametrize("degrees", [30.0, -45.0, 181.0])
def test_rotation_agrees_with_torchvision(pixels: np.ndarray, degrees: float) -> None:
    from torchvision.transforms import InterpolationMode

    x = torch.from_numpy(pixels)[:, None].float()
    theirs = torchvision_rotate(x, degrees, InterpolationMode.BILINEAR, fill=[0.0])
    inside = slice(4, 12)  # torchvision blends the border with its fill in another way
    torch.testing.assert_close(rotate(x, degrees)[..., inside, inside], theirs[..., inside, inside], atol=0.05, rtol=0)


def test_inversion_twice_is_the_identity_and_comes_after_rotation(pixels: np.ndarray) -> None:
    once = render(pixels, Change((16, 16), True, invert=True))[:, 0]
    assert np.array_equal(once, 255 - pixels)
    assert np.array_equal(render(once.numpy(), Change((16, 16), True, invert=True))[:, 0], pixels)
    corner = render(np.full((1, 16, 16), 9, np.uint8), Change((16, 16), True, 45.0, invert=True))[0, 0, 0, 0]
    assert corner == 255  # a background of 0 fills the corners, then it is inverted


def test_channels_and_sizes(pixels: np.ndarray) -> None:
    coloured = np.repeat(pixels[..., None], 3, axis=-1)
    assert np.array_equal(render(coloured, Change((16, 16), True))[:, 0], pixels)
    assert np.array_equal(render(coloured, Change((16, 16), False)), coloured.transpose(0, 3, 1, 2))
    assert torch.equal(render(pixels, Change((16, 16), False)), render(coloured, Change((16, 16), False)))
    red = np.zeros((1, 4, 4, 3), np.uint8)
    red[..., 0] = 255
    assert (render(red, Change((4, 4), True)) == round(0.299 * 255)).all()
    for size in (8, 28):
        assert render(pixels, Change((size, size), True)).shape == (7, 1, size, size)
        assert (render(np.full_like(pixels, 77), Change((size, size), True)) == 77).all()
    assert render(pixels[:0], Change((8, 8), False, 10.0)).shape == (0, 3, 8, 8)
