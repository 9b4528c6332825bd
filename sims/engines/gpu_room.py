"""Check at the start that Ray has resources for one worker: without them, an actor waits in silence."""

import time
from collections.abc import Mapping

import ray
import torch

from fedloom.conf.errors import UserError
from fedloom.conf.schema import EngineConfig

PATIENCE = 10.0  # seconds to wait for workers that are ending and nodes that are joining
POLL_SECONDS = 0.5


def needs_of(engine: EngineConfig) -> dict[str, float]:
    """Return the numbers of CPUs and GPUs that one worker needs, by Ray's names, without zeros."""
    return {name: need for name, need in {"CPU": engine.num_cpus, "GPU": engine.num_gpus}.items() if need > 0}


def refuse_gpus(engine: EngineConfig) -> None:
    """Raise UserError if a worker needs more GPUs than this machine has and Ray is to start here."""
    available = torch.cuda.device_count() if engine.num_gpus else 0
    if engine.num_gpus > available and not engine.address and not ray.is_initialized():
        has = f"{available} GPU{'s' * (available > 1)}" if available else "no GPU"
        raise UserError(f"engine.num_gpus: got {engine.num_gpus:g}, and this machine has {has} that torch can use; "
                        f"take {available} at most")  # fmt: skip


def refuse_full(engine: EngineConfig, patience: float = PATIENCE) -> None:
    """Raise UserError if after `patience` seconds no machine of this Ray has free resources for one worker."""
    needs, deadline = needs_of(engine), time.monotonic() + patience
    while (problem := _lacking(needs)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if problem:
        raise UserError(problem)


def _lacking(needs: Mapping[str, float]) -> str:
    """Why no worker can start; empty if one can."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, need in needs.items():
        if need > (most := max((node.get(name, 0.0) for node in nodes), default=0.0)):
            return (f"engine.num_{name.lower()}s: got {need:g}, and no machine of this Ray has more than {most:g} {name}s; "
                    f"take {most:g} at most")  # fmt: skip
    if not any(all(node.get(name, 0.0) >= need for name, need in needs.items()) for node in nodes):
        wanted = " and ".join(f"{need:g} {name}" for name, need in needs.items())
        return f"engine.num_cpus, engine.num_gpus: no machine of this Ray has {wanted} for one worker; take less"
    free, total = ray.available_resources(), ray.cluster_resources()
    for name, need in needs.items():
        if need > free.get(name, 0.0):
            return (f"engine.num_{name.lower()}s: a worker takes {need:g}, and of this Ray's {total.get(name, 0):g} {name}s "
                    f"{free.get(name, 0.0):g} are free; wait until other runs end, or take less")  # fmt: skip
    return ""
