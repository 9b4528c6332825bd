"""Where to compute."""

import torch

from fedloom.conf.errors import UserError
from fedloom.conf.schema import EngineConfig


def pick_device(name: str, share: float = 1.0) -> torch.device:
    """The device of engine.device: `auto` takes a GPU if this process sees one. UserError for a GPU that is not there.

    `share`: of the GPU's memory, above which this process gets no more.
    """
    seen = torch.cuda.is_available()
    if name == "cuda" and not seen:
        raise UserError("engine.device: got cuda, but this worker sees no GPU; set engine.num_gpus, or engine.device=auto")
    if share < 1.0 and seen and name != "cpu":
        torch.cuda.set_per_process_memory_fraction(share)
    return torch.device("cuda" if seen and name != "cpu" else "cpu")


def memory_share(engine: EngineConfig) -> float:
    """Of a GPU's memory, how much a simulated site may take: where several workers share a GPU, its worker's part."""
    return engine.num_gpus if engine.name == "ray" and 0.0 < engine.num_gpus < 1.0 else 1.0
