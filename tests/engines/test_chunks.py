"""How many messages a call of a worker gets."""

import random

import pytest

from fedloom.sims.engines.chunks import SECONDS_PER_CALL, ChunkPolicy


def learnt(seconds: list[float], workers: int = 2) -> ChunkPolicy:
    policy = ChunkPolicy(workers)
    for _ in range(30):
        policy.learn(seconds)
    return policy


def calls(policy: ChunkPolicy, waiting: int) -> list[int]:
    """The sizes of the calls if all workers draw in turn."""
    sizes = []
    while waiting:
        size = policy.size(waiting, 1)
        for _ in range(min(policy.workers, -(-waiting // size))):
            sizes.append(min(size, waiting))
            waiting -= sizes[-1]
    return sizes


def test_sites_that_take_equally_long_go_in_one_call_for_each_worker():
    assert calls(learnt([0.02] * 5), 20) == [10, 10]
    assert calls(learnt([0.02, 0.021, 0.019, 0.02]), 21) == [11, 10]
    assert calls(learnt([0.02] * 5, workers=4), 20) == [5, 5, 5, 5]


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_unequal_sites_go_in_calls_of_falling_size(workers: int):
    sizes = calls(learnt([0.001, 0.002, 0.004, 0.1], workers), 100)
    assert len(sizes) >= 3 * workers
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == 100


def test_no_call_takes_longer_than_its_aim():
    assert max(calls(learnt([0.1] * 5), 50)) == int(SECONDS_PER_CALL / 0.1)


def test_one_call_teaches_the_duration_and_not_that_all_sites_are_equal():
    policy = ChunkPolicy(2)
    policy.learn([0.02] * 5)
    assert policy.task_seconds == pytest.approx(0.02)
    assert len(calls(policy, 20)) > 2


def test_nothing_is_learnt_from_a_call_without_messages():
    policy = ChunkPolicy(2)
    policy.learn([])
    assert policy.task_seconds is None


def test_unequal_sites_end_almost_together():
    """With one call for each worker, the last would end a quarter later than with perfect shares."""
    draw, workers, late = random.Random(0), 4, []
    for _ in range(50):
        times = [0.01 * draw.lognormvariate(0, 1.2) for _ in range(200)]
        policy, ends, queue = learnt(times, workers), [0.0] * workers, list(times)
        while queue:
            first = ends.index(min(ends))
            taken, queue = queue[: (size := policy.size(len(queue), 1))], queue[size:]
            ends[first] += sum(taken)
        late.append(max(ends) / (sum(times) / workers))
    assert sum(late) / len(late) < 1.1
