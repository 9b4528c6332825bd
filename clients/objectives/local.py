"""Plain training of the network that the server sent; all of its weights and statistics come back."""

from dataclasses import dataclass

from fedloom.clients.objectives.base import OBJECTIVES, Objective, Session, Task
from fedloom.clients.objectives.plain import PlainSession, state_of
from fedloom.clients.protocol.messages import SITE
from fedloom.conf.typed import option
from fedloom.fusion.state import State

TOGETHER, FORWARD, BACKWARD = "together", "sequential_ab", "sequential_ba"


@OBJECTIVES.register("local")
@dataclass(frozen=True)
class Local(Objective):
    """Cross-entropy. `mode` is for the server: who starts from what."""

    mode: str = option(
        TOGETHER,
        "all sites start from one network, or each where the one before ended, in the roster's order or against it",
        choices=(TOGETHER, FORWARD, BACKWARD),
    )

    def session(self, task: Task) -> Session:
        """Start on a task."""
        return LocalSession(task)


class LocalSession(PlainSession):
    """From the server's network on; the whole trained state is the contribution."""

    from_server = frozenset({SITE})

    def contribution(self) -> dict[str, State]:
        return {SITE: state_of(self.network)}
