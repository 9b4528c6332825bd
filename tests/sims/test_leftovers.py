"""What a run leaves at the SuperLink that ended without saying so is deleted there, and no other run's."""

from flwr.common.constant import NOOP_FLWR_AID, SubStatus
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType

from fedloom.sims.federation import leftovers
from tests.sims.links import Link


def held(link: Link) -> list[int]:
    """Numbers of rows that hold messages or parts of them."""
    names = ("objects", "message_ins", "message_res", "object_push_sessions")
    return [link.state.query(f"SELECT count(*) AS n FROM {name}")[0]["n"] for name in names]


def test_what_a_run_leaves_that_ended_without_saying_so_is_deleted(link: Link):
    node = link.nodes[0]
    link.whole(node, link.reply(node, link.order(node)))  # and nobody fetches it
    before = held(link)
    assert not leftovers.clear(link.state) and held(link) == before and all(before[:3])
    ended, link.run = (
        link.run,
        link.state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP),
    )
    other = link.order(node)
    task = link.state.get_run_info(run_ids=[ended])[0].primary_task_id
    assert task is not None and link.state.finish_task(task, SubStatus.FAILED, "No heartbeat received from the task")
    assert leftovers.clear(link.state) and held(link) == [3, 1, 0, 0]
    assert link.whole(node, link.reply(node, other))
