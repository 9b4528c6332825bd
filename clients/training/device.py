"""The choice of the device to compute on."""

import torch

from fedloom.conf.errors import UserError
from fedloom.conf.schema import EngineConfig


def pick_device(name: str, share: float = 1.0) -> torch.device:
    """Return the device that `name` (engine.device) stands for. `auto` takes a GPU if this process sees one.

    `share`: the largest share of the GPU's memory for this process. Raises UserError for `cuda` without a GPU.
    """
    seen = torch.cuda.is_available()
    if name == "cuda" and not seen:
        raise UserError("engine.device: got cuda, but this worker sees no GPU; set engine.num_gpus, or engine.device=auto")
    if share < 1.0 and seen and name != "cpu":
        torch.cuda.set_per_process_memory_fraction(share)
    return torch.device("cuda" if seen and name != "cpu" else "cpu")


def memory_share(engine: EngineConfig) -> float:
    """Return the share of a GPU's memory for a simulated site: its worker's share of the GPU."""
    return engine.num_gpus if engine.name == "ray" and 0.0 < engine.num_gpus < 1.0 else 1.0
