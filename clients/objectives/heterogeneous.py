"""Sites of different networks: each trains the one of its own architecture that the server sent."""

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
    """Cross-entropy. `mode` is for the server: whose networks are brought together."""

    mode: str = option(
        FUSED,
        "networks of all architectures are fused, or averaged with those of their own (exclusive), or not at all (alone)",
        choices=(FUSED, EXCLUSIVE, ALONE),
    )

    def session(self, task: Task) -> Session:
        """Start on a task."""
        if MEAN not in task.incoming:
            return AloneSession(task)
        return LocalSession(task) if self.mode == EXCLUSIVE else self.joint(task)

    def joint(self, task: Task) -> Session:
        """The same where networks are brought together; methods with a loss of their own have another one."""
        return LocalSession(task)


class AloneSession(LocalSession):
    """From the site's own network on, which starts as its name draws it; the server is told, and tells nothing."""

    from_server = frozenset()

    def start(self) -> State:
        return self.task.own or initial_state(self.task.config, self.task.site.name, self.task.site)

    def local_state(self) -> State | None:
        return state_of(self.network)
