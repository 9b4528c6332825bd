"""Layer selection with one task after the other: changes add up, layers that are not chosen go back, tasks come back."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedloom.clients.objectives.layer_selection.session import CHOSEN, COUNTS, MASS, SELECTION
from fedloom.clients.protocol.messages import MEAN, SITE
from fedloom.conf import Config
from fedloom.fusion.exact import ExactSum
from fedloom.fusion.state import State
from fedloom.server.ledger.audit import check as audit
from fedloom.server.rounds.transport import TooFewRepliesError
from fedloom.server.strategies.layer_selection import CHANGES, SHARED
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from tests.server.arithmetics import one_core, same
from tests.server.parts import Recorder, folder
from tests.server.resumes import Stopped, Stopper
from tests.server.runs import copied, method_of, to_resume
from tests.server.selections import (
    LAYERS,
    TASKS,
    A,
    B,
    C,
    Done,
    Noting,
    accuracy_of,
    configured,
    found,
    left,
    own_state,
    run,
    selection_of,
)
from tests.server.test_unlearning_live import Asking


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


def lifelong(root: Path, *words: str, tasks: list[str] = TASKS) -> Config:
    return configured(root, "strategy.arrival=lifelong", *words, tasks=tasks)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Three tasks of two rounds each, one after the other; the second one says that it chose the first layer alone."""
    fault = selection_of(lambda state: {**state, CHOSEN: torch.tensor([1.0, 0.0])})
    return run(lifelong(tmp_path_factory.mktemp("lifelong")), Noting(fault, 1, (1, 2)))


def change(done: Done, site: int) -> State:
    """What a site's turn changed in what is shared."""
    sent, reply = done.client.of(site, 1)[0][MEAN], done.client.of(site, 2)[1][SITE]
    return {name: one - sent[name] for name, one in reply.items()}


def close(one: State, other: State) -> bool:
    return all(torch.allclose(one[name], other[name], atol=1e-6) for name in other)


def test_tasks_come_one_after_the_other_and_continue_from_what_is_shared(done: Done) -> None:
    assert done.client.orders == [(site, round) for site in range(3) for round in (1, 2)]
    first, second = done.client.of(0, 1), done.client.of(0, 2)
    assert close(second[0][MEAN], first[1][SITE])
    assert not close(second[0][MEAN], first[0][MEAN])
    assert found(done)["own"] == [[1, 2], [3, 4], [5, 6]]
    assert all(done.summary["checks"].values()) and not audit(folder(done.config))


def test_layers_that_a_task_did_not_choose_go_back_at_its_end(done: Done) -> None:
    before, last = done.client.of(1, 1)[0][MEAN], done.client.of(1, 2)
    after = done.client.of(2, 1)[0][MEAN]
    for part in ("weight", "bias"):
        name, other = (f"{layer}.{part}" for layer in LAYERS)
        torch.testing.assert_close(after[name], last[1][SITE][name], atol=1e-6, rtol=0)
        torch.testing.assert_close(after[other], before[other], atol=1e-6, rtol=0)
        assert not torch.allclose(last[0][MEAN][other], before[other])  # within its turn it went on from its own


def test_what_is_shared_is_the_start_and_the_sum_of_all_changes(done: Done) -> None:
    start = done.client.of(0, 1)[0][MEAN]
    with method_of(done.config) as method:
        view, total = method.state.view(), ExactSum(32)
        for site in (A, B, C):
            total.add(view.integers(CHANGES, site))
        expected = {name: start[name] + one for name, one in total.total().items()}
        assert same(view.server_state(SHARED), expected)
        kept = {name: one for name, one in change(done, 1).items() if name.startswith(LAYERS[0])}
        assert close(view.contribution(CHANGES, B), kept)
        assert not any(one.any() for name, one in view.contribution(CHANGES, B).items() if name.startswith(LAYERS[1]))


def test_forgetting_subtracts_the_change_and_nothing_else(done: Done, tmp_path: Path) -> None:
    config, start = copied(done.config, tmp_path), done.client.of(0, 1)[0][MEAN]
    unlearn(folder(config), UnlearningRequest([A], id="r1"))
    with method_of(config) as method:
        view, total = method.state.view(), ExactSum(32)
        with method_of(done.config) as before:
            for site in (B, C):
                total.add(before.state.view().integers(CHANGES, site))
        assert same(view.slots.total(CHANGES).totals, total.totals)
        assert same(view.server_state(SHARED), {name: start[name] + one for name, one in total.total().items()})
        [facts] = method.state.strategy.summary_entries(view)["layer_selection"].values()
        assert facts["sites"] == [B, C] and facts["own"] == [[3, 4], [5, 6]]
        residue, _ = method.state.residue([A])
        assert "other sites' own layers" in residue.location
    assert not audit(folder(config))


def test_tasks_of_long_ago_are_measured_with_what_is_shared_now(done: Done) -> None:
    with method_of(done.config) as method:
        shared = method.state.view().server_state(SHARED)
    rows = found(done)["accuracy"]
    assert [[one is None for one in row] for row in rows] == [[round < start for round in range(6)] for start in (0, 2, 4)]
    assert [row[-1] for row in rows] == [pytest.approx(accuracy_of(done, place, shared)) for place in range(3)]
    assert list(done.summary["accuracy"]["personal"].values())[:3] == [row[-1] for row in rows]
    assert len({accuracy_of(done, place, shared) for place in range(3)}) > 1


def test_measured_at_the_end_alone_and_with_the_prior_of_all_tasks(tmp_path: Path) -> None:
    done = run(lifelong(tmp_path, "objective.prior=tasks", "strategy.every=0"))
    assert [[one is None for one in row] for row in found(done)["accuracy"]] == [[True] * 5 + [False]] * 3
    given = [done.client.of(site, 2)[1][SELECTION][COUNTS] for site in range(3)]
    assert COUNTS not in done.client.of(0, 2)[0]
    assert torch.equal(done.client.of(1, 2)[0][COUNTS][COUNTS].long(), given[0])
    assert torch.equal(done.client.of(2, 1)[0][COUNTS][COUNTS].long(), given[0] + given[1])


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(done: Done, tmp_path: Path, after: int) -> None:
    config = lifelong(tmp_path)
    fault = selection_of(lambda state: {**state, CHOSEN: torch.tensor([1.0, 0.0])})
    with pytest.raises(Stopped):
        run(config, Noting(fault, 1, (1, 2)), Stopper(after))
    run(to_resume(config), Noting(fault, 1, (1, 2)))
    assert left(config) == left(done.config)


def test_a_task_that_lost_its_store_restarts_from_what_is_shared(tmp_path: Path) -> None:
    config, heard = lifelong(tmp_path, tasks=TASKS[:2]), Recorder()
    with pytest.raises(Stopped):
        run(config, listener=Stopper(3))
    [gone] = store_folder(config).glob(f"*/{B}")
    shutil.rmtree(gone)
    done = run(to_resume(config), listener=heard)
    assert heard.messages[-1].startswith(f"round 4: {B} has lost its own state")
    assert int(own_state(done, 1)[COUNTS].sum()) == 6 and int(own_state(done, 0)[COUNTS].sum()) == 12
    assert all(done.summary["checks"].values())


def test_no_one_has_the_turn_of_a_task_that_was_forgotten_before_it(tmp_path: Path) -> None:
    """Once it was asked and added up all the same."""
    config, client = lifelong(tmp_path), Noting()
    heard = Asking(folder(config), {"r1": [B]})
    done = run(config, client, heard)
    assert client.orders == [(0, 1), (0, 2), (2, 1), (2, 2)]
    assert heard.messages == [f"Request 'r1' is verified: the contributions of {B} are removed."] and heard.asked == [
        1,
        1,
        0,
        0,
        1,
        1,
    ]
    assert found(done)["sites"] == [A, C] and found(done)["own"] == [[1, 2], [5, 6]]
    assert all(done.summary["checks"].values()) and not audit(folder(config))


def test_the_task_at_work_may_be_forgotten(tmp_path: Path) -> None:
    config, client = lifelong(tmp_path, tasks=TASKS[:2]), Noting()
    run(config, client, Asking(folder(config), {"r1": [A]}))
    assert client.orders == [(0, 1), (1, 1), (1, 2)]
    assert same(client.of(1, 1)[0][MEAN], client.of(0, 1)[0][MEAN])  # nothing of the forgotten one is in it
    assert not audit(folder(config))


def test_a_task_that_comes_back_continues_with_its_own_parameters(tmp_path: Path) -> None:
    config, client = lifelong(tmp_path, tasks=TASKS[:2]), Noting()
    done = run(config, client, Asking(folder(config), {"r1": [B]}, during=4, repair=2))
    assert client.orders == [(0, 1), (0, 2), (1, 1), (1, 2), (0, 1), (0, 2)]
    assert int(own_state(done, 0)[COUNTS].sum()) == 4 * 6
    assert found(done)["own"] == [[1, 6]] and found(done)["sites"] == [A]
    with method_of(config) as method:
        view = method.state.view()
        chosen = client.replied[-1][SELECTION][CHOSEN].tolist()
        for layer, bit in zip(LAYERS, chosen, strict=True):
            name = f"{layer}.weight"
            expected = client.replied[-1][SITE] if bit else client.sent[0][MEAN]
            torch.testing.assert_close(view.server_state(SHARED)[name], expected[name], atol=1e-6, rtol=0)


def test_going_back_before_a_task_trains_those_behind_it_again(tmp_path: Path) -> None:
    config, client = lifelong(tmp_path, "federation.history=all"), Noting()
    done = run(config, client, Asking(folder(config), {"r1": [B]}, during=5, rollback=True))
    assert client.orders == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 1), (2, 2)]
    assert found(done)["sites"] == [A, C] and found(done)["own"] == [[1, 2], [5, 6]]
    assert close(client.sent[5][MEAN], client.sent[2][MEAN])  # as the first task left it
    assert all(done.summary["checks"].values()) and not audit(folder(config))


def test_a_task_that_is_readmitted_has_its_turn(tmp_path: Path) -> None:
    config, client = lifelong(tmp_path), Noting()
    with pytest.raises(Stopped):
        run(config, client, Stopper(3))
    unlearn(folder(config), UnlearningRequest([B], id="r1"))
    with method_of(to_resume(config)) as method:
        method.state.readmit([B])
    done = run(to_resume(config), client)
    assert client.orders == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)]
    assert found(done)["sites"] == [A, B, C] and int(own_state(done, 1)[COUNTS].sum()) == 6
    assert found(done)["own"] == [[1, 2], [4, 4], [5, 6]]
    assert all(done.summary["checks"].values()) and not audit(folder(config))


def test_a_hostile_reply_stops_a_turn_where_no_one_else_is_asked(tmp_path: Path) -> None:
    """As with any method that asks one site in a round: the run ends, and goes on with the same bits."""
    config = lifelong(tmp_path / "one", tasks=TASKS[:2])
    fault = selection_of(lambda state: {**state, MASS: torch.full((2,), float("nan"))})
    with pytest.raises(TooFewRepliesError, match="round 3: 0 good replies"):
        run(config, Noting(fault, 1, (1,)))
    run(to_resume(config))
    other = lifelong(tmp_path / "other", tasks=TASKS[:2])
    run(other)
    assert left(config) == left(other)
