"""What runs leave in a SuperLink's database that ended without saying so: messages, and parts of them.

Flower (1.41) deletes them only when somebody asks for something of such a run; nobody does after a crash.
"""

from flwr.common.constant import Status
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.utils import int64_to_uint64

RUNS = "SELECT run_id FROM run_objects UNION SELECT run_id FROM message_ins UNION SELECT run_id FROM object_push_sessions"


def clear(state: SqlLinkState) -> bool:
    """Delete what is held of runs that have ended; whether there was anything."""
    held = {int64_to_uint64(row["run_id"]) for row in state.query(RUNS)}
    ended = [run for run, told in state.get_run_status(held).items() if told.status == Status.FINISHED]
    for run in ended:
        state.cleanup_run(run)
    return bool(ended)
