"""`fedloom bench attacks` on tiny cases: what hostile sites send, what bounds do to it, the form of the rows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.clients.data import Examples
from fedloom.clients.networks import Model
from fedloom.conf import UserError
from fedloom.server.run.checks import check
from fedloom.sims.benchmarks import attacks
from fedloom.sims.benchmarks.attack_sites import PATCH, TARGET, flipped, planted, triggered
from fedloom.sims.benchmarks.attacks import (
    ATTACKS,
    BACKDOOR,
    COLLUDING,
    DEFENCES,
    FREE,
    HOSTILE,
    Attack,
    configured,
    measured,
    run,
)

TINY: dict[str, Any] = {
    **attacks.SETTING,
    "sites": [{"domain": "digits", "count": 10, "samples": 20}],
    "rounds": 1,
    "network": {"name": "mlp", "widths": [8]},
    "data": {"size": 8, "test_limit": 40},
}
FAR = Attack({HOSTILE: {"poison": "flip", "factor": 1e4}}, triggers=False)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacks, "SETTING", TINY)


def moved(attack: Attack, folder: Path) -> dict[str, torch.Tensor]:
    """How far each site's contribution is from the network that all begin with."""
    with attacks.trained(attack, FREE, 0, folder) as method:
        view, first = method.state.view(), method.state.view().initial()
        each = {site.name: view.contribution("sum", site.name) for site in view.sites}
    return {site: torch.cat([(state[name] - first[name]).flatten() for name in state]) for site, state in each.items()}


def test_poisoned_images_are_copies():
    images = Examples(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([1, 9]))
    stamped = triggered(images)
    assert int((stamped.x > 0).sum()) == 2 * PATCH**2 and not images.x.any()
    assert stamped.x[0, 0, -1, -1] == 255 and stamped.y.tolist() == [1, 9]
    assert planted(images).y.tolist() == [TARGET, TARGET] and planted(images).x.any()
    assert flipped(images).y.tolist() == [8, 0] and images.y.tolist() == [1, 9]


def test_a_hostile_site_sends_so_many_times_what_it_learned_and_the_others_what_they_should(tmp_path: Path):
    clean = moved(ATTACKS["none"], tmp_path / "clean")
    flips = moved(Attack({HOSTILE: {"poison": "flip"}}), tmp_path / "flips")
    far = moved(Attack({HOSTILE: {"factor": 10.0}}), tmp_path / "far")
    torch.testing.assert_close(far[HOSTILE], 10 * clean[HOSTILE], rtol=1e-3, atol=1e-5)
    assert not torch.equal(flips[HOSTILE], clean[HOSTILE])
    assert all(torch.equal(flips[site], clean[site]) for site in clean if site != HOSTILE)


@pytest.mark.parametrize(
    ("bound", "refused", "clipped"), [("none", 0.0, 0.0), ("largest_change=10", 1.0, 0.0), ("clip_change=1", 0.0, 1.0)]
)
def test_bounds_refuse_or_clip_what_is_far(bound: str, refused: float, clipped: float):
    found = run(FAR, DEFENCES[bound], 0)
    assert (found.refused, found.clipped) == (refused, clipped)
    assert found.shares.keys() == {"", HOSTILE}
    assert all(one.keys() == {"accuracy"} for one in found.shares.values())


def test_colluding_sites_are_forgotten_one_by_one_and_can_be_left_out():
    both = Attack({HOSTILE: BACKDOOR, COLLUDING: {"poison": "camouflage"}})
    assert run(both, FREE, 0).shares.keys() == {"", HOSTILE, COLLUDING}
    assert run(both, FREE, 0, [COLLUDING]).shares.keys() == {"", HOSTILE}


def test_success_is_measured_on_triggered_images_of_other_classes_alone(tmp_path: Path):
    """By a network that says TARGET to all: all of them are taken for it, and clean images of that class are right."""
    with attacks.trained(ATTACKS["none"], FREE, 0, tmp_path) as method:
        model = method.state.aggregate()
        biased = {name: torch.zeros_like(tensor) for name, tensor in model.state.items()}
        biased["head.bias"][TARGET] = 1.0
        found = measured(method.evaluator, Model(model.architecture, biased))
        labels = method.evaluator.images("digits", "test").y
    assert found == {"success": 1.0, "accuracy": pytest.approx(float((labels == TARGET).double().mean()))}


@pytest.mark.nightly
def test_the_table_has_a_row_for_every_attack_and_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attacks, "SEEDS", 2)
    monkeypatch.setattr(attacks, "ATTACKS", {name: ATTACKS[name] for name in ("labels flipped", "backdoor and camouflage")})
    monkeypatch.setattr(attacks, "DEFENCES", {"none": FREE})
    table, rows = attacks.bench()
    assert [row["attack"] for row in rows] == [
        "labels flipped", "backdoor and camouflage", "hostile site never there", "camouflage never there"
    ]  # fmt: skip
    assert rows[1]["forgotten"].keys() == {HOSTILE, COLLUDING} and len(rows[1]["trained"]["success"]) == 2
    assert all(len(line) == len(attacks.HEAD) for line in table.rows)
    assert table.rows[0][6] == "" and "±" in str(table.rows[1][6])


def test_a_role_that_is_none_is_one_line(tmp_path: Path):
    with pytest.raises(UserError, match=r"objective\.roles\.site-0009\.poison: got 'flips', takes"):
        check(configured(Attack({HOSTILE: {"poison": "flips"}}), FREE, 0, tmp_path))
