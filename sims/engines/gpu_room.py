"""Whether Ray has a place for a single worker: compared at the start, since an actor without one waits in silence."""

import time
from collections.abc import Mapping

import ray
import torch

from fedloom.conf.errors import UserError
from fedloom.conf.schema import EngineConfig

PATIENCE = 10.0  # seconds for which workers that have just ended, or nodes that are coming, are waited for
POLL_SECONDS = 0.5


def needs_of(engine: EngineConfig) -> dict[str, float]:
    """What a worker takes, by Ray's names."""
    return {name: need for name, need in {"CPU": engine.num_cpus, "GPU": engine.num_gpus}.items() if need > 0}


def refuse_gpus(engine: EngineConfig) -> None:
    """UserError where a Ray on this machine is to be started for workers with more GPUs than there are."""
    there = torch.cuda.device_count() if engine.num_gpus else 0
    if engine.num_gpus > there and not engine.address and not ray.is_initialized():
        has = f"{there} GPU{'s' * (there > 1)}" if there else "no GPU"
        raise UserError(f"engine.num_gpus: got {engine.num_gpus:g}, and this machine has {has} that torch can use; "
                        f"take {there} at most")  # fmt: skip


def refuse_full(engine: EngineConfig, patience: float = PATIENCE) -> None:
    """UserError if no machine of the Ray that was joined has what a worker takes, or if all of it is in use."""
    needs, deadline = needs_of(engine), time.monotonic() + patience
    while (why := _lacking(needs)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if why:
        raise UserError(why)


def _lacking(needs: Mapping[str, float]) -> str:
    """Why no worker has a place; empty if one has."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, need in needs.items():
        if need > (most := max((node.get(name, 0.0) for node in nodes), default=0.0)):
            return (f"engine.num_{name.lower()}s: got {need:g}, and no machine of this Ray has more than {most:g} {name}s; "
                    f"take {most:g} at most")  # fmt: skip
    if not any(all(node.get(name, 0.0) >= need for name, need in needs.items()) for node in nodes):
        told = " and ".join(f"{need:g} {name}" for name, need in needs.items())
        return f"engine.num_cpus, engine.num_gpus: no machine of this Ray has {told} for one worker; take less"
    free, total = ray.available_resources(), ray.cluster_resources()
    for name, need in needs.items():
        if need > free.get(name, 0.0):
            return (f"engine.num_{name.lower()}s: a worker takes {need:g}, and of this Ray's {total.get(name, 0):g} {name}s "
                    f"{free.get(name, 0.0):g} are free; wait until others have ended, or take less")  # fmt: skip
    return ""
