"""The part of a machine or cluster that a run may use, if several runs use it at the same time."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """The part of a machine or cluster for one of `runs` simultaneous runs. `on_gpu`: runs that share each visible GPU.

    Cores and GPUs of this machine are already divided: a process sees its own (sims.sweeps.worker_pool). Memory is not.
    """

    runs: int = 1
    on_gpu: int = 1

    def of_machine(self, resources: Mapping[str, float]) -> dict[str, float]:
        """Return a run's part of the resources that its process sees: CPU, GPU (numbers), memory (bytes)."""
        by = {"memory": self.runs, "GPU": self.on_gpu}
        return {name: amount / by.get(name, 1) for name, amount in resources.items()}

    def of_cluster(self, resources: Mapping[str, float]) -> dict[str, float]:
        """Return a run's part of a cluster's resources. Every run sees all of them."""
        return {name: amount / self.runs for name, amount in resources.items()}


WHOLE = Share()
