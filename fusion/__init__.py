"""Mathematics on networks and their states, without Flower, Ray, files or global state.

Two networks of different depth and width become one:

>>> import torch
>>> from torch import nn
>>> from fedloom.fusion import align, fuse
>>> _ = torch.manual_seed(0)
>>> deep = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
>>> shallow = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
>>> images = torch.randn(64, 8)  # inputs of both networks; no labels
>>> align(deep, shallow, probe=images).pairs
{'0': '0'}
>>> fused = fuse([deep, shallow], into=0, probe=images)
>>> fused.network(images).shape
torch.Size([64, 3])
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.fusion.alignment import Alignment, align
    from fedloom.fusion.cla_ot.transport import TransportSettings
    from fedloom.fusion.pipeline import fuse
    from fedloom.fusion.results import Fused
    from fedloom.fusion.settings import FusionSettings

__all__ = ["Alignment", "Fused", "FusionSettings", "TransportSettings", "align", "fuse"]

_MODULES = {"Alignment": "alignment", "align": "alignment", "Fused": "pipeline", "fuse": "pipeline",
            "FusionSettings": "settings", "TransportSettings": "cla_ot.transport"}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because exact sums need none of what fusion imports."""
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
