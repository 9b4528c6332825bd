"""A flat state is a state like any other: it has the same sums, files and messages, whatever its tensors are."""

import pickle
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor, nn

from fedloom.clients.protocol.codec import encode
from fedloom.clients.protocol.messages import to_arrays
from fedloom.clients.protocol.packing import unpacked
from fedloom.clients.storage.states import safetensors_of
from fedloom.fusion.exact import ExactSum, dequantise, quantise
from fedloom.fusion.flat import copy_of, fill, flat_of, flattened
from fedloom.fusion.state import State, digest

SHAPES = st.dictionaries(
    st.text("ab.é", min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5
)
SEEDS = st.integers(0, 2**31)


def drawn(shapes: dict[str, list[int]], seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@given(SHAPES, SEEDS)
def test_sums_of_flat_states_are_those_of_others(shapes: dict[str, list[int]], seed: int):
    sums = ExactSum(32), ExactSum(32), ExactSum(32)
    for number in range(3):
        state = drawn(shapes, seed + number)
        plain, flat = quantise(state, 32), quantise(flattened(state), 32)
        assert flat_of(flat) is not None and same(plain, flat)
        for total, part in zip(sums, (plain, flat, flat if number % 2 else plain), strict=True):
            total.add(part, number + 1)
            if number:
                total.replace(part, part, 1, 2)
    assert len({digest(total.totals) for total in sums}) == 1
    assert same(dequantise(sums[0].totals, 32, 3), dequantise(sums[1].totals, 32, 3))
    copy = sums[1].copy()
    copy.subtract(quantise(flattened(drawn(shapes, seed)), 32))
    assert digest(sums[0].totals) == digest(sums[1].totals)


@given(SHAPES, SEEDS)
def test_files_and_messages_of_flat_states_have_the_same_bytes(shapes: dict[str, list[int]], seed: int):
    state = drawn(shapes, seed)
    for each in (state, quantise(state, 32)):
        flat = flattened(each)
        assert safetensors_of(flat) == safetensors_of(each)
        assert safetensors_of(flat) == save(
            {name: each[name].contiguous() for name in sorted(each)}, metadata={"format": "pt"}
        )
        sent = to_arrays(flat)
        assert {name: array.data for name, array in sent.items()} == {name: encode(each[name]).data for name in each}
        assert same(unpacked(sent), each)


@given(SHAPES, SEEDS)
def test_a_copy_shares_nothing(shapes: dict[str, list[int]], seed: int):
    state = flattened(drawn(shapes, seed))
    before = digest(state)
    for tensor in copy_of(state).values():
        tensor.zero_()
    assert digest(state) == before and same(pickle.loads(pickle.dumps(state)), state)


def test_a_state_whose_tensor_was_replaced_is_not_flat():
    state = flattened({"a": torch.ones(2), "b": torch.ones(3)})
    assert flat_of(state) is not None
    state["b"] = torch.zeros(3)
    assert flat_of(state) is None
    assert torch.equal(quantise(state, 2)["b"], torch.zeros(3, dtype=torch.int64))


def test_states_of_different_types_stay_as_they_are():
    mixed: dict[str, Tensor] = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)}
    assert flattened(mixed) is mixed and same(unpacked(to_arrays(mixed)), mixed)
    assert unpacked(ArrayRecord()) == {}


@given(SHAPES, SEEDS)
def test_reading_a_state_as_integers_does_not_change_it(shapes: dict[str, list[int]], seed: int):
    for kind in (torch.float32, torch.float64):
        state = flattened({name: tensor.to(kind) for name, tensor in drawn(shapes, seed).items()})
        before = digest(state)
        assert same(quantise(state, 20), quantise(state, 20)) and digest(state) == before


class Doubled(nn.Linear):
    """Loads twice its weights."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(
            {name: 2 * tensor for name, tensor in state_dict.items()}, prefix, *arguments, **options
        )


class Halved(nn.Linear):
    """Saves half its weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update(
            {name: tensor / 2 for name, tensor in state.items() if name.startswith(prefix)}
        ))  # fmt: skip


class Saved(nn.Linear):
    """Saves copies of its weights."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: tensor.clone() for name, tensor in self.named_parameters()})


@pytest.mark.parametrize("kind", [nn.Linear, Doubled, Halved, Saved])
def test_a_module_is_filled_as_it_would_load_the_state(kind: type[nn.Linear]):
    one, other = (nn.Sequential(kind(3, 4), nn.ReLU(), kind(4, 2)) for _ in range(2))
    state = flattened({name: torch.randn(tensor.shape) for name, tensor in one.state_dict().items()})
    fill(one, state)
    other.load_state_dict(dict(state))
    assert same(dict(one.named_parameters()), dict(other.named_parameters()))
    with pytest.raises(RuntimeError, match="Missing key"):
        fill(one, flattened({"0.weight": torch.zeros(4, 3)}))
