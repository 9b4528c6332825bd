"""Messages as they travel to Ray workers and back: large arrays out of band, shared records once for all."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedloom.clients.protocol.partial_sums import PartialSum

SHARED_BYTES = 32 * 1024  # smaller records travel inside their messages

PackedArrays = list[tuple[str, str, tuple[int, ...], str, np.ndarray]]
PackedSum = tuple[PartialSum, dict[str, PackedArrays]]  # all but its records, and these


@dataclass(frozen=True)
class Shared:
    """The place of a record that stands in the object store."""

    reference: Any


def record_bytes(record: ArrayRecord) -> int:
    """The size of a record's arrays."""
    return sum(len(array.data) for array in record.values())


def pack_arrays(record: ArrayRecord) -> PackedArrays:
    """The record with each array's bytes as a uint8 view, which pickles out of band and without a copy."""
    return [
        (key, array.dtype, array.shape, array.stype, np.frombuffer(array.data, np.uint8)) for key, array in record.items()
    ]


def unpack_arrays(packed: PackedArrays) -> ArrayRecord:
    """A new record on the packed bytes: whoever edits it does not reach another message's record."""
    record = ArrayRecord()
    for key, dtype, shape, stype, data in packed:
        array = Array(dtype, shape, stype, b"")
        array.data = data.data if len(data) else b""  # type: ignore[assignment]  # a memoryview reads like bytes
        record[key] = array
    return record


class SharedRecords:
    """Puts each large record into the object store once, recognised by identity for as long as it lives."""

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self._put = put
        self._places: dict[int, Shared] = {}

    def place(self, record: ArrayRecord) -> Shared | None:
        """Where the record stands; None if it is small enough to travel in its message."""
        known = self._places.get(id(record))
        if known is None and record_bytes(record) >= SHARED_BYTES:
            known = self._places[id(record)] = Shared(self._put(pack_arrays(record)))
            weakref.finalize(record, self._places.pop, id(record), None)
        return known


def pack(message: Message, shared: SharedRecords | None = None) -> tuple[Any, ...]:
    """A message as plain parts: metadata, error or records; large arrays out of band."""
    if message.has_error():
        return (message.metadata, message.error, None)
    records: list[tuple[str, Any]] = []
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            records.append((name, (shared.place(record) if shared else None) or pack_arrays(record)))
        else:
            records.append((name, record))
    return (message.metadata, None, records)


def unpack(parts: tuple[Any, ...], fetch: Callable[[Shared], PackedArrays] | None = None) -> Message:
    """The inverse of pack; `fetch` brings what stands in the object store."""
    metadata, error, records = parts
    if error is not None:
        return Message(metadata=metadata, error=error)  # type: ignore[call-overload]  # Flower's own, private form
    content = RecordDict()
    for name, record in records:
        whole: Any = fetch(record) if isinstance(record, Shared) and fetch else record
        content[name] = unpack_arrays(whole) if isinstance(whole, list) else whole
    return Message(metadata=metadata, content=content)  # type: ignore[call-overload]


def pack_sum(sum: PartialSum) -> PackedSum:
    """A partial sum as plain parts."""
    return replace(sum, records={}), {name: pack_arrays(record) for name, record in sum.records.items()}


def unpack_sum(packed: PackedSum) -> PartialSum:
    """The inverse of pack_sum."""
    sum, records = packed
    return replace(sum, records={name: unpack_arrays(record) for name, record in records.items()})


def sum_size(packed: PackedSum) -> int:
    """Bytes of the arrays of a packed sum."""
    return sum(data.nbytes for record in packed[1].values() for *_, data in record)


def size(parts: tuple[Any, ...]) -> int:
    """Bytes of the arrays that travel inside packed parts."""
    return sum(data.nbytes for _, record in parts[2] or () if isinstance(record, list) for *_, data in record)
