"""A run whose own checks fail says so and ends as failed; nothing is subtracted from a sum that is not one."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.conf import Config
from fedloom.conf.errors import FailedError, UserError
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.server.ledger.slots import Slots
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from tests.server.parts import files, folder, small


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run of three sites whose sum has one unit too many, as when a contribution was lost on its way."""
    config = small(tmp_path, "rounds=2", sites=3, samples=20)
    commit = Slots.commit

    def loses(self: Slots, round: int, record: dict[str, Any]) -> None:
        next(iter(self.total("sum").totals.values())).view(-1)[0] += 1
        commit(self, round, record)

    with monkeypatch.context() as patch:
        patch.setattr(Slots, "commit", loses)
        with pytest.raises(FailedError, match=r"failed checks: .*sum_of_contributions.*ledger .* --check"):
            run_experiment(InlineGrid(3, store_folder(config)), config, LogListener())
    return config


def test_a_run_whose_sum_is_not_one_ends_as_failed(wrong: Config):
    summary = json.loads((folder(wrong) / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["checks"]["sum_of_contributions"] is False
    assert any("is not the sum of the latest contributions" in problem.what for problem in check(folder(wrong)))


def test_nothing_is_erased_where_it_could_not_be_certified(wrong: Config):
    def kept() -> dict[str, Any]:
        return {name: content for name, content in files(folder(wrong)).items() if not name.startswith("ledger")}

    before = kept()
    with pytest.raises(
        UserError, match="the stored sum is not the sum of the contributions, so nothing is subtracted or erased"
    ):
        unlearn(folder(wrong), UnlearningRequest(["site-0001"]))
    assert kept() == before
    with Ledger.open(folder(wrong), server=False) as ledger:
        assert ledger.sites() == dict.fromkeys(["site-0000", "site-0001", "site-0002"], False)
        assert len(ledger.all_latest()) == 3
