"""A run is the same whatever the program around it has set of torch, which finds it as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fedloom import run
from fedloom.clients.training.torch_setup import ordinary
from fedloom.conf import UserError
from tests.sims.test_api import TREE

pytestmark = pytest.mark.usefixtures("blank_pictures")


@contextmanager
def of_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def on_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)


def test_the_same_bits_whatever_is_set(tmp_path: Path):
    plain = run(TREE, f"run.root={tmp_path}", "run.name=plain").summary["digest"]
    for name, around in {
        "double": of_double(),
        "meta": on_meta(),
        "no": torch.no_grad(),
        "inference": torch.inference_mode(),
    }.items():
        with around:
            result = run(TREE, f"run.root={tmp_path}", f"run.name={name}")
            assert result.summary["digest"] == plain
            assert next(result.network.parameters()).dtype == torch.float32
            assert result.measure(result.network)["union"] >= 0


def test_contexts_nest():
    """An own network is built in `ordinary` while its size is counted on the meta device."""
    with torch.device("meta"):
        with ordinary():
            assert torch.zeros(1).device.type == "cpu"
        assert torch.zeros(1).device.type == "meta"
    with on_meta(), ordinary():
        assert torch.zeros(1).device.type == "cpu"
    assert torch.zeros(1).device.type == torch.get_default_device().type == "cpu"


def test_a_module_of_the_users_that_sets_the_type_and_one_of_another_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "typed.py").write_text(
        "import torch\nfrom torch import nn\ntorch.set_default_dtype(torch.float64)\n\n"
        "def net(size, classes, kind='float32'):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(size * size, classes)).to(getattr(torch, kind))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with ordinary():
        own = {**TREE, "network": {"name": "typed:net"}}
        assert run(own, f"run.root={tmp_path}", "run.name=own").summary["status"] == "finished"
        with pytest.raises(UserError, match=r"'typed:net' has weights of torch\.float64, takes torch\.float32; convert"):
            run(own, f"run.root={tmp_path}", "run.name=other", "network.kind=float64")
    assert torch.get_default_dtype() == torch.float32
