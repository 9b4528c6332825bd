"""Run one task of an App: `python -m ... APPS`. Flower's command line comes on stdin, so that its token stays secret."""

import json
import sys
from importlib.metadata import entry_points

from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType

from fedloom.server.flower.http_answers import be_wary
from fedloom.server.flower.unfolding import read_by_hash
from fedloom.sims.federation.heartbeats import keep_beating
from fedloom.sims.federation.own_app import be_client_app


def main(apps: str) -> None:
    """Run the Flower command whose command line is on stdin, as a JSON list. `apps`: ANY or OWN."""
    with sys.stdin:
        words = json.load(sys.stdin)
    sys.argv = words
    if words[0] == TASK_TYPE_TO_COMMAND[TaskType.CLIENT_APP]:
        be_client_app(apps)
    keep_beating()
    be_wary()
    if words[0] == TASK_TYPE_TO_COMMAND[TaskType.SERVER_APP]:
        read_by_hash()
    (command,) = entry_points(group="console_scripts", name=words[0])
    command.load()()


if __name__ == "__main__":
    main(*sys.argv[1:])
