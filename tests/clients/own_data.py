"""Parts of the tests of own data: configurations, what they read, folders of images."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from fedloom.clients import data
from fedloom.clients.data.examples import Examples
from fedloom.conf import Config
from fedloom.conf.loading import from_mapping

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def config(*sites: dict[str, Any], grey: bool = False, size: int = 6, **more: Any) -> Config:
    return from_mapping({"experiment": "test", "sites": list(sites), "data": {"size": size, "grey": grey}, **more})


def images(domain: str, **more: Any) -> Examples:
    settings = config({"domain": domain}, **more)
    return data.site_examples(settings, settings.roster[0])


def colours(root: Path, count: int, size: int = 6, suffix: str = ".png") -> Path:
    """A folder of `count` images of one colour in each class folder."""
    for name, colour in COLOURS.items():
        (root / name / "deeper").mkdir(parents=True)
        for number in range(count):
            place = root / name / ("deeper" if number % 2 else "") / f"{number}{suffix}"
            Image.new("RGB", (size + number % 3, size), colour).save(place)
    return root


def right(found: Examples) -> bool:
    """Whether each image has the colour of its class."""
    channel = torch.tensor([2, 1, 0])[found.y]
    return bool((found.x.float().mean((2, 3)).argmax(1) == channel).all())
