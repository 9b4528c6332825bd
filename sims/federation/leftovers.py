"""Delete the messages of crashed runs from a SuperLink's database.

Flower (1.41) deletes them only at the next request about such a run, which never comes after a crash.
"""

from flwr.common.constant import Status
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.utils import int64_to_uint64

RUNS = "SELECT run_id FROM run_objects UNION SELECT run_id FROM message_ins UNION SELECT run_id FROM object_push_sessions"


def clear(state: SqlLinkState) -> bool:
    """Delete the data of ended runs from a SuperLink's database, and return whether there was any."""
    held = {int64_to_uint64(row["run_id"]) for row in state.query(RUNS)}
    ended = [run for run, state_of in state.get_run_status(held).items() if state_of.status == Status.FINISHED]
    for run in ended:
        state.cleanup_run(run)
    return bool(ended)
