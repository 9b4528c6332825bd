"""Plain training of the server's network. All its weights and statistics are sent back."""

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
    """Cross-entropy. `mode` tells the server which network each site starts from."""

    mode: str = option(
        TOGETHER,
        "together: all sites start from one network; sequential_ab, sequential_ba: each site starts where the previous site "
        "ended, in the roster's order or in reverse",
        choices=(TOGETHER, FORWARD, BACKWARD),
    )

    def session(self, task: Task) -> Session:
        return LocalSession(task)


class LocalSession(PlainSession):
    """Trains the server's network. The whole trained state is the contribution."""

    from_server = frozenset({SITE})

    def contribution(self) -> dict[str, State]:
        return {SITE: state_of(self.network)}
