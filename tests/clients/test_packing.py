"""Contributions in half of their bytes: how far off they are, what is kept of them, and what is refused."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedloom.clients.protocol.packing import PACKINGS, packed, unpacked
from fedloom.clients.storage.states import read_state
from fedloom.conf import UserError
from fedloom.fusion.exact import quantise
from fedloom.fusion.state import digest
from fedloom.server.run.checks import check
from fedloom.sims.engines.adapter import store_folder
from tests.server.parts import WatchedApp, close_all, contribution, set_up, small, sum_of_contributions

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(arrays.arrays(np.float32, SHAPES, elements=FLOATS), st.sampled_from(sorted(PACKINGS)))
def test_what_arrives_is_as_near_as_is_said_and_travels_again_unchanged(array: np.ndarray, name: str):
    tensor = torch.from_numpy(array)
    record = packed({"x": tensor}, name)
    came = unpacked(record)["x"]
    assert came.shape == tensor.shape and came.dtype == torch.float32
    most = float(tensor.abs().max()) if tensor.numel() else 0.0
    off, size = (came.double() - tensor.double()).abs(), tensor.double().abs()
    bound = size * 2**-8 + 2**-134 if name == "bf16" else most * (1 / 65534 + 2**-24) + 2**-149
    assert bool((off <= bound).all())
    assert record["x"].stype != name or len(record["x"].data) == PACKINGS[name].head + 2 * tensor.numel()
    if name == "bf16":
        assert torch.equal(unpacked(packed({"x": came}, name))["x"], came)


@pytest.mark.parametrize("name", PACKINGS)
def test_other_kinds_of_number_and_what_is_not_finite_go_as_they_are(name: str):
    state = {"steps": torch.tensor(7), "half": torch.ones(2).half(), "odd": torch.tensor([1.0, math.nan]),
             "large": torch.tensor([3.4e38])}  # fmt: skip
    came = unpacked(packed(state, name))
    assert all(came[key].dtype == state[key].dtype for key in state)
    assert came["odd"].isnan().tolist() == [False, True] and came["large"].isfinite().all()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (Array("float32", (4,), "int16", bytes(15)), "has 15 bytes"),
        (Array("float32", (-1,), "int16", bytes(16)), "has no valid shape"),
        (Array("float64", (4,), "int16", bytes(16)), "is not float32"),
        (Array("float32", (4,), "int16", np.float64(np.inf).tobytes() + bytes(8)), "scale is not a finite number"),
        (Array("float32", (4,), "int16", np.float64(-1.0).tobytes() + bytes(8)), "scale is not a finite number"),
        (Array("float32", (4,), "bf16", bytes(7)), "has 7 bytes"),
        (Array("float32", (2**40,), "bf16", bytes(8)), "has 8 bytes"),
    ],
)
def test_what_is_not_a_packed_tensor_is_refused(array: Array, message: str):
    with pytest.raises(ValueError, match=message):
        unpacked(ArrayRecord({"x": array}))


@pytest.mark.parametrize("name", PACKINGS)
def test_the_sum_is_that_of_what_was_sent_and_the_site_keeps_just_that(tmp_path: Path, name: str):
    config = small(tmp_path, f"federation.packed={name}", "rounds=2", samples=20)
    run = set_up(config, app := WatchedApp()).all_rounds()
    assert run.aggregate.digest()["sum"] == sum_of_contributions(run.aggregate)
    for site in run.aggregate.setup.sites:
        kept = contribution(run.aggregate, site.name)
        own = read_state(store_folder(config) / "run" / site.name / "round-000002.safetensors")
        assert digest(quantise({key: own[key] for key in kept}, run.aggregate.slots.bits)) == digest(kept)
    plain = set_up(small(tmp_path / "plain", "rounds=2", samples=20)).all_rounds()
    both = [sum(received for _, received in run.listener.records[0]["bytes"].values()) for run in (run, plain)]
    assert both[0] < 0.6 * both[1] and {order.kind for order in app.orders} == {"train"}
    assert run.aggregate.digest() != plain.aggregate.digest()
    close_all()


def test_packed_updates_and_masks_exclude_each_other(tmp_path: Path):
    with pytest.raises(UserError, match=r"federation\.packed: secure_aggregation"):
        check(small(tmp_path, "federation.packed=bf16", "federation.secure_aggregation=true"))
