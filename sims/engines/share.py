"""What part of a machine or cluster a run may take, where several go on at once."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """`runs` go on at once. `on_gpu`: how many of them share each GPU that this process sees.

    Cores and GPUs of this machine are divided before: a process sees its own (sims.sweeps.worker_pool). Memory is not.
    """

    runs: int = 1
    on_gpu: int = 1

    def of_machine(self, resources: Mapping[str, float]) -> dict[str, float]:
        """A run's part of what its process sees of the machine: CPU, GPU (numbers), memory (bytes)."""
        by = {"memory": self.runs, "GPU": self.on_gpu}
        return {what: amount / by.get(what, 1) for what, amount in resources.items()}

    def of_cluster(self, resources: Mapping[str, float]) -> dict[str, float]:
        """A run's part of a cluster's resources, which all runs see whole."""
        return {what: amount / self.runs for what, amount in resources.items()}


WHOLE = Share()
