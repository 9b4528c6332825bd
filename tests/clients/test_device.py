"""Where a site computes: several workers on one GPU each get no more than their part of its memory."""

from pathlib import Path

import pytest
import torch
from flwr.app import Message, RecordDict

from fedloom.clients.job import read_job
from fedloom.clients.protocol.messages import CONFIG, ORDER, TaskInstructions, config_digest, text_record
from fedloom.conf import load, to_json
from fedloom.sims.engines.adapter import site_context, take_identity


@pytest.fixture
def capped(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A GPU that is there in word only, and the parts of its memory that were asked for."""
    found: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", found.append)
    return found


@pytest.mark.parametrize(
    ("words", "shares"),
    [
        (["engine.name=ray", "engine.num_gpus=0.25"], [0.25]),
        (["engine.name=ray", "engine.num_gpus=1"], []),
        (["engine.name=ray"], []),
        (["engine.name=inline", "engine.num_gpus=0.25"], []),
        (["engine.name=ray", "engine.num_gpus=0.25", "engine.device=cpu"], []),
    ],
)
def test_workers_that_share_a_gpu_share_its_memory(tmp_path: Path, capped: list[float], words: list[str], shares: list):
    take_identity()
    text = to_json(load("digits", words))
    order = TaskInstructions(config_digest(text), "run", site=0, round=1, rounds=1, base=0, members=2)
    message = Message(RecordDict({ORDER: order.record(), CONFIG: text_record(text)}), 2, "train")
    job = read_job(message, site_context(0, 2, str(tmp_path)))
    assert job.device.type == ("cpu" if "engine.device=cpu" in words else "cuda")
    assert capped == shares


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_site_that_needs_more_than_its_part_fails_and_the_gpu_continues():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total // 5, dtype=torch.uint8, device="cuda")
        assert torch.ones(3, device="cuda").sum() == 3
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
