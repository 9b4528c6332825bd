"""Arrays as Flower makes them, byte for byte, whatever the dtype and shape; other writers' bytes are read too."""

import io

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedloom.clients.protocol.codec import decode, decode_again, decode_flat, encode
from fedloom.clients.protocol.messages import to_arrays
from fedloom.clients.protocol.packing import unpacked
from fedloom.fusion.state import State, digest
from fedloom.sims.engines.codec import pack_arrays, unpack_arrays

DTYPES = st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8, np.bool_])


@given(st.data(), DTYPES, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
def test_bytes_and_values_are_flowers(data: st.DataObject, dtype: type, shape: tuple[int, ...]):
    array = data.draw(arrays.arrays(dtype, shape))
    encoded, flowers = encode(torch.from_numpy(array)), Array(array)
    assert (encoded.dtype, encoded.shape, encoded.stype, encoded.data) == (
        flowers.dtype,
        flowers.shape,
        flowers.stype,
        flowers.data,
    )
    np.testing.assert_array_equal(decode(flowers).numpy(), array)


def test_a_strided_tensor_is_written_in_order():
    tensor = torch.arange(12.0).reshape(3, 4).T
    assert torch.equal(decode(encode(tensor)), tensor)


def test_what_is_decoded_may_be_written_to():
    tensor = decode(encode(torch.zeros(3)))
    tensor += 1
    assert tensor.tolist() == [1, 1, 1]


def test_other_headers_are_read_by_numpy():
    file = io.BytesIO()
    np.save(file, np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    assert decode(Array("float64", (2, 3), "numpy.ndarray", file.getvalue())).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("shape", [(0, 2**31, 2**31, 2**31), (0, 2**61), (2**31, 0, 2**30), (0, 2**60), (3, 0)])
def test_empty_arrays_of_any_shape_are_read_alike(shape: tuple[int, ...]):
    file = io.BytesIO()
    head = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, head)
    array = Array("float32", shape, "numpy.ndarray", file.getvalue())
    if shape in ((0, 2**60), (3, 0)):
        found = decode_flat({"w": array})
        assert found is not None and found["w"].shape == decode(array).shape == shape
    else:
        assert decode_flat({"w": array}) is None
        with pytest.raises(ValueError, match="too big"):
            decode(array)


@pytest.mark.parametrize("dtype", ["float32", "nonsense"])
@pytest.mark.parametrize("data", [b"", b"damage", encode(torch.zeros(3)).data[:-1]])
def test_damage_is_an_error(dtype: str, data: bytes):
    with pytest.raises((ValueError, EOFError)):
        decode(Array(dtype, (3,), "numpy.ndarray", data))


def record_of(seed: int, view: bool = False) -> ArrayRecord:
    """Two float32 tensors; `view`: their bytes are read from arrays, as in a worker."""
    torch.manual_seed(seed)
    record = to_arrays({"a": torch.randn(3, 2), "b": torch.randn(4)})
    return unpack_arrays(pack_arrays(record)) if view else record


@pytest.mark.parametrize("view", [False, True])
def test_a_record_that_comes_again_is_decoded_once_and_copied(view: bool):
    decoded: list[object] = []

    def decoder(record: ArrayRecord) -> State:
        decoded.append(record)
        return unpacked(record)

    first, second, held = record_of(1, view), record_of(2, view), []
    for record in (first, first, second, first, second):
        state = decode_again(record, decoder)
        assert digest(state) == digest(unpacked(record))
        for tensor in state.values():
            tensor.zero_()  # changes no other site's copy
        held.append(state)
    assert decoded == [first, second]
    assert len({tensor.data_ptr() for state in held for tensor in state.values()}) == 2 * len(held)


def test_records_with_the_same_bytes_but_other_names_shapes_or_kinds_are_distinguished():
    whole = record_of(1)
    renamed = ArrayRecord({"c" if name == "b" else name: array for name, array in whole.items()})
    for record in (whole, renamed):
        assert decode_again(record, unpacked).keys() == record.keys()
    packed = to_arrays({"a": torch.randn(3, 2), "b": torch.randn(4)}, "bf16")
    assert digest(decode_again(packed, unpacked)) == digest(unpacked(packed))
    for name, array in packed.items():
        whole[name] = Array(array.dtype, array.shape, "numpy.ndarray", array.data)
    with pytest.raises(ValueError):  # NumPy's, as without the copy
        decode_again(whole, unpacked)


def test_parts_of_one_buffer_are_distinguished():
    """Several records may be views of one longer buffer, such as a whole message."""
    records = [record_of(1), record_of(2)]
    whole = b"".join(array.data for record in records for array in record.values())
    views, begin = [], 0
    for record in records:
        view = ArrayRecord()
        for name, array in record.items():
            view[name] = Array(array.dtype, array.shape, array.stype, b"")
            view[name].data = memoryview(whole)[begin : begin + len(array.data)]  # type: ignore[assignment]
            begin += len(array.data)
        views.append(view)
    for view, record in zip([*views, *views], [*records, *records], strict=True):
        assert digest(decode_again(view, unpacked)) == digest(unpacked(record))
