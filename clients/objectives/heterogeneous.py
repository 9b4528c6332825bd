"""Training where sites have different networks: each trains the server's network of its architecture."""

from dataclasses import dataclass

from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives.base import OBJECTIVES, Session, Task
from fedloom.clients.objectives.local import Local, LocalSession
from fedloom.clients.objectives.plain import state_of
from fedloom.clients.protocol.messages import MEAN
from fedloom.conf.typed import option
from fedloom.fusion.state import State

FUSED, EXCLUSIVE, ALONE = "fused", "exclusive", "alone"


@OBJECTIVES.register("heterogeneous")
@dataclass(frozen=True)
class Heterogeneous(Local):
    """Cross-entropy. `mode` tells the server which networks to combine."""

    mode: str = option(
        FUSED,
        "fused: networks of all architectures are combined; exclusive: networks of the same architecture; alone: none",
        choices=(FUSED, EXCLUSIVE, ALONE),
    )

    def needed_strategy(self) -> str:
        return super().needed_strategy() if self.mode == FUSED else ""

    def session(self, task: Task) -> Session:
        if MEAN not in task.incoming:
            return AloneSession(task)
        return LocalSession(task) if self.mode == EXCLUSIVE else self.fused_session(task)

    def fused_session(self, task: Task) -> Session:
        """Return the session for mode `fused`: the site trains its network from what the server sends.

        A method with another loss overrides this method.
        """
        return LocalSession(task)


class AloneSession(LocalSession):
    """Trains the site's own network, whose initial weights the site's name seeds. The server sends nothing back."""

    from_server = frozenset()

    def start(self) -> State:
        return self.task.own or initial_state(self.task.config, self.task.site.name, self.task.site)

    def local_state(self) -> State | None:
        return state_of(self.network)
