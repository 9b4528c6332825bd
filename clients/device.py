"""Where to compute."""

import torch

from conf.errors import UserError


def pick_device(name: str) -> torch.device:
    """The device of engine.device: `auto` takes a GPU if this process sees one. UserError for a GPU that is not there."""
    seen = torch.cuda.is_available()
    if name == "cuda" and not seen:
        raise UserError("engine.device: got cuda, but this worker sees no GPU; set engine.num_gpus, or engine.device=auto")
    return torch.device("cuda" if seen and name != "cpu" else "cpu")
