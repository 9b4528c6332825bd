"""Masked rounds of few sites: one that lies does not end them, and federation.min_replies counts."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedloom.clients.protocol.messages import BLAMED, SECURE_KEYS, SECURE_SHARES, SUMMED_BEFORE, TRAIN, to_states
from fedloom.conf import Config
from fedloom.server.rounds.transport import TooFewRepliesError
from fedloom.server.run_folder.layout import METRICS
from tests.server.masked import MASKS, ONE, TWO, Spoiled, gone, run
from tests.server.parts import small


def configured(root: Path, *words: str, sites: int = 5, masks: Sequence[str] = MASKS) -> Config:
    return small(root, *masks, "baselines=[]", "rounds=1", "training.batch=4", *words, sites=sites, samples=20)


def record_of(config: Config) -> dict:
    return json.loads((Path(config.run.root) / config.run.name / METRICS).read_text())


def accuses(message: Message, reply: Message) -> Message:
    """Blame the last other site whose keys or shares the message has."""
    states = to_states(message.content)
    others = [name for name in states.get(SECURE_KEYS) or states[SECURE_SHARES] if name not in (ONE, TWO)]
    return Message(RecordDict({BLAMED: ConfigRecord({"site": sorted(others)[-1]})}), reply_to=message)


def refuses(message: Message, reply: Message) -> Message:
    return Message(RecordDict({SUMMED_BEFORE: ConfigRecord({"round": 1})}), reply_to=message)


@pytest.mark.parametrize(("sites", "liars"), [(4, 1), (5, 1), (6, 1), (8, 2), (10, 2)])
@pytest.mark.parametrize("kind", [SECURE_SHARES, TRAIN])
def test_sites_that_accuse_others_end_no_round(tmp_path: Path, kind: str, sites: int, liars: int):
    config = configured(tmp_path, sites=sites)
    run(config, Spoiled(accuses, [kind], range(1, 1 + liars)))
    record = record_of(config)
    assert record["replies"] == sites - liars and set(record["dropped"]) == ({ONE} if liars == 1 else {ONE, TWO})


@pytest.mark.parametrize("masks", [MASKS, ()])
def test_a_round_with_too_few_replies_is_not_committed_under_masks_either(tmp_path: Path, masks: Sequence[str]):
    config = configured(tmp_path, "federation.min_replies=5", masks=masks)
    with pytest.raises(TooFewRepliesError, match=r"federation\.min_replies=5"):
        run(config, Spoiled(gone, [SECURE_KEYS if masks else TRAIN], (1, 2)))


@pytest.mark.parametrize("kind", [SECURE_KEYS, SECURE_SHARES])
def test_a_site_that_refuses_a_sum_before_there_is_one_is_named(tmp_path: Path, kind: str):
    config = configured(tmp_path)
    run(config, Spoiled(refuses, [kind]))
    record = record_of(config)
    assert record["replies"] == 4 and "before the sites of the sum are known" in record["dropped"][ONE]
