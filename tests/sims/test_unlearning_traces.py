"""`fedloom reproduce unlearning`, its small federations: tiny ones, FedEraser's replay, the tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.clients.data import site_examples
from fedloom.clients.networks.initial import initial_state
from fedloom.conf import UserError
from fedloom.server.ledger import Ledger
from fedloom.sims.experiments import unlearning
from fedloom.sims.experiments.unlearning import shadows, traces
from fedloom.sims.experiments.unlearning.averaging import averaged, calibrated, sifu_start
from fedloom.sims.experiments.unlearning.shadows import LEAVER, configured, everything, membership, opened


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network, training = {"name": "mlp", "widths": [4]}, {**shadows.SETTING["training"], "epochs": 2}
    small: dict[str, Any] = {**shadows.SETTING, "rounds": 2, "network": network, "training": training}
    small["data"] = {**shadows.SETTING["data"], "size": 8}
    for name, number in (("POOL", 40), ("DRAWN", 20), ("KEPT", 20), ("TEST", 30)):
        monkeypatch.setattr(shadows, name, number)
    for module in (shadows, traces):
        monkeypatch.setattr(module, "SETTING", small)
    for name, number in (("ROUNDS", 2), ("FURTHER", 1), ("RESTORE", 1), ("MAX_STEPS", 4), ("RELEARNED", 1)):
        monkeypatch.setattr(traces, name, number)
    monkeypatch.chdir(tmp_path)


def test_each_federation_draws_half_of_the_pool_and_the_others_keep_their_images(tmp_path: Path):
    first, second = (configured("averaging", seed, tmp_path / str(seed)) for seed in (0, 1))
    drawn = membership(first), membership(second)
    assert [int(one.sum()) for one in drawn] == [shadows.DRAWN] * 2
    assert 0 < np.logical_and(*drawn).sum() < shadows.DRAWN
    leaver = site_examples(first, first.roster[-1])
    assert torch.equal(everything(first).x[torch.from_numpy(drawn[0])], leaver.x)
    same = [site_examples(config, config.roster[0]) for config in (first, second)]
    assert torch.equal(same[0].x, same[1].x) and torch.equal(same[0].y, same[1].y)


def test_a_replayed_step_has_the_direction_of_the_new_one_and_the_length_of_the_old():
    start = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([2.0])}
    end = {"a": torch.tensor([4.0, 5.0]), "b": torch.tensor([2.0])}
    found = calibrated(start, end, {"a": 10.0, "b": 3.0})
    torch.testing.assert_close(found["a"], torch.tensor([7.0, 9.0]))
    assert torch.equal(found["b"], start["b"])


def test_the_replay_moves_every_site_as_far_as_the_ledger_says_it_had(tmp_path: Path):
    run = tmp_path / "run"
    with opened(configured("averaging", 0, run)) as first:
        first.train()
    with opened(configured("averaging", 0, tmp_path / "replay", changes=traces._replay(run)), [LEAVER]) as again:
        again.train()
    old, new = ({site: ledger.history(site) for site in ledger.sites()} for ledger in (read(run), read(tmp_path / "replay")))
    assert LEAVER in old and LEAVER not in new
    with read(run) as then, read(tmp_path / "replay") as now:
        for round in (1, 2):
            begun = [means(ledger, given, round - 1) for ledger, given in ((then, old), (now, new))]
            for site, given in new.items():
                ends = then.blobs.get(old[site][round - 1].blob), now.blobs.get(given[round - 1].blob)
                if round == 1:
                    begun = [first.method.state.view().initial()] * 2
                lengths = [{name: float(torch.dist(end[name], start[name])) for name in end}
                           for end, start in zip(ends, begun, strict=True)]  # fmt: skip
                assert lengths[0] == pytest.approx(lengths[1], rel=1e-3, abs=1e-5)


def read(folder: Path) -> Ledger:
    return Ledger.open(folder, server=False)


def means(ledger: Ledger, given: dict, round: int) -> dict[str, torch.Tensor]:
    if round == 0:
        return {}
    return averaged([(ledger.blobs.get(each[round - 1].blob), each[round - 1].samples) for each in given.values()])


@pytest.mark.parametrize(("share_of_bound", "last"), [(0.5, 0), (1.01, 1), (10.0, 2)])
def test_sifu_starts_from_the_last_round_that_the_noise_hides(tmp_path: Path, share_of_bound: float, last: int):
    config = configured("averaging", 0, tmp_path / "run")
    with opened(config) as run:
        run.train()
        sent = [(run.method.ledger.blobs.get(each[0].blob), each[0].samples) for each in histories(run)]
        others = [pair for pair, site in zip(sent, run.method.ledger.sites(), strict=True) if site != LEAVER]
        mean, rest = averaged(sent), averaged(others)
        influence = float(torch.cat([(mean[name] - rest[name]).flatten() for name in mean]).norm())
        start, found = sifu_start(config, run.method.ledger, LEAVER, 0.01, share_of_bound * influence)
        expected = {0: initial_state(config), 1: mean, 2: run.model().state}[last]
    assert found == last
    moved = torch.cat([(start[name] - expected[name]).flatten() for name in expected])
    assert float(moved.std()) == pytest.approx(0.01, rel=0.2) and abs(float(moved.mean())) < 0.005


def histories(run: shadows.Shadow) -> list[Any]:
    return [run.method.ledger.history(site) for site in run.method.ledger.sites()]


@pytest.mark.parametrize(
    ("method", "ways"),
    [
        ("averaging", {"replay", "sifu", "restored", "far back", "repair"}),
        ("exact", {"restored", "far back", "repair", "recalibrated"}),
    ],
)
def test_a_federation_forgets_in_every_way(method: str, ways: set[str]):
    found = traces.shadow(method, 0)
    assert found["ways"].keys() == {"before", "subtract", "retrained", "again"} | ways
    assert sum(found["was"]) == shadows.DRAWN and len(found["was"]) == shadows.POOL
    for name, one in found["ways"].items():
        assert len(one["confidences"]) == shadows.POOL and np.isfinite(one["confidences"]).all()
        assert (one["distance"] == 0 and one["apart"] == 0) if name == "retrained" else 0 < one["apart"] <= 1
        assert one["relearned"] in (0, 2, 4)


def test_sites_that_leave_one_after_the_other_are_measured_on_both_sides():
    found = traces.left("averaging", 0)
    assert [list(one) for one in found] == [["subtract"], *[["subtract", "restored", "retrained"]] * 3]
    assert all(0 <= share <= 1 for one in found for sides in one.values() for share in sides.values())


def made_up(method: str, seed: int) -> dict[str, Any]:
    """Of a federation in which subtraction leaves everything, and a retrained network differs by chance alone."""
    random = np.random.default_rng(seed)
    was, names = (
        random.random(50) < 0.5,
        [name for name in traces.WAYS if name not in ("replay", "sifu") or method == "averaging"],
    )
    plain = {"forgotten": 0.2, "retained": 0.6, "seconds": 1.0, "distance": 0.5, "apart": 0.1, "relearned": 2}
    there = {name: 9.0 * was if name in ("before", "subtract") else 0.0 for name in names}
    ways = {name: {**plain, "confidences": (there[name] + random.normal(size=50)).tolist()} for name in names}
    return {"was": was.tolist(), "ways": ways}


def test_the_tables_have_a_row_for_every_way_and_are_taken_from_disk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(traces, "shadow", made_up)
    sides = {"left": 0.1, "stay": 0.6}
    monkeypatch.setattr(
        traces, "left", lambda *_: [{"subtract": sides}, *[{"subtract": sides, "restored": sides, "retrained": sides}] * 3]
    )
    folder = unlearning.reproduce("cpu", 1, ["tables=traces,sequence"], quiet=True)
    text = (folder / "tables.md").read_text()
    rows = {row[1]: row for line in text.splitlines() if (row := [cell.strip() for cell in line.split("|")])[1:]}
    assert (rows["subtract"][4], rows["subtract"][6]) == ("100.0", "100.0")
    assert float(rows["retrained, other batches"][4]) < 10 and rows["retrained"][4] == ""
    assert text.count("| retrained, other batches |") == 2 and text.count("FedEraser's replay") == 1
    assert "8 federations" in text and "Requests one after the other, 1 seed" in text
    monkeypatch.setattr(traces, "shadow", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(traces, "left", lambda *_: pytest.fail("measured again"))
    assert unlearning.reproduce("cpu", 1, ["tables=traces,sequence"], quiet=True) == folder
    assert (folder / "tables.md").read_text() == text
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize(
    ("preset", "words", "message"),
    [("paper", [], "unknown preset 'paper'"), ("cpu", ["tables=trace"], "did you mean 'traces'")],
)
def test_another_preset_or_table_is_one_line(preset: str, words: list[str], message: str):
    with pytest.raises(UserError, match=message):
        unlearning.reproduce(preset, 1, words, quiet=True)
