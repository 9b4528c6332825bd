"""Masked rounds of few sites: one that lies does not end them, and federation.min_replies counts."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedloom.clients.protocol.messages import BLAMED, SECURE_KEYS, SECURE_SHARES, SUMMED_BEFORE, TRAIN, to_states
from fedloom.conf import Config, UserError
from fedloom.server.rounds.transport import TooFewRepliesError
from fedloom.server.run.checks import check
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


AVERAGED = ("objective={name: fedavg}", "strategy={name: fedavg, weighting: equal}")


@pytest.mark.parametrize("why", ["federation.fraction=0.6", "federation.dropout=0.2"])
def test_a_batch_of_all_images_is_refused_before_the_run_if_rounds_have_different_sites(tmp_path: Path, why: str):
    with pytest.raises(UserError, match=rf"training.batch: got 20, but site-0000 has 20 .*{why} .* at most 19"):
        check(configured(tmp_path, why, "training.batch=20"))
    for words in ([why, "training.batch=19"], [why, "training.batch=20", "privacy={clip: 1, noise: 1}"],
                  ["training.batch=20"]):  # fmt: skip
        check(configured(tmp_path, *words))
    check(configured(tmp_path, why, "training.batch=20", masks=()))


def test_a_falling_rate_that_may_end_in_a_refused_sum_is_announced(tmp_path: Path):
    def said(*words: str) -> bool:
        listener = run(configured(tmp_path, "rounds=5", *words, masks=masks))
        return any("sites may refuse a late sum" in message for message in listener.messages)

    masks = ("federation.secure_aggregation=true", *AVERAGED)
    assert said("federation.fraction=0.8", "run.name=one")
    assert not said("federation.fraction=0.8", "training.schedule=constant", "run.name=two")
    assert not said("run.name=three")
