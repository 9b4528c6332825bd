"""Pack messages for Ray workers: large arrays travel out of band, shared records only once."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedloom.clients.protocol.partial_sums import PartialSum

SHARED_BYTES = 32 * 1024  # smaller records travel inside their messages
NEW = "\0new"  # beside the records of a partial sum: PartialSum.new

PackedArrays = list[tuple[str, str, tuple[int, ...], str, np.ndarray]]
PackedSum = tuple[PartialSum, dict[str, PackedArrays]]  # a sum without its records, and the records


@dataclass(frozen=True)
class Shared:
    """A Ray reference to a packed record in the object store."""

    reference: Any


def record_bytes(record: ArrayRecord) -> int:
    """Return the size of a record's arrays in bytes."""
    return sum(len(array.data) for array in record.values())


def pack_arrays(record: ArrayRecord) -> PackedArrays:
    """Return (key, dtype, shape, stype, bytes) of each array. The bytes are a uint8 view, pickled without a copy."""
    return [
        (key, array.dtype, array.shape, array.stype, np.frombuffer(array.data, np.uint8)) for key, array in record.items()
    ]


def unpack_arrays(packed: PackedArrays) -> ArrayRecord:
    """Return a new record that reads the packed bytes. Replacing its arrays changes no other message's record."""
    record = ArrayRecord()
    for key, dtype, shape, stype, data in packed:
        array = Array(dtype, shape, stype, b"")
        array.data = data.data if len(data) else b""  # type: ignore[assignment]  # a memoryview reads like bytes
        record[key] = array
    return record


class SharedRecords:
    """Puts each large record into the object store once. It recognises a record by its Python identity."""

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self._put = put
        self._references: dict[int, Shared] = {}

    def reference(self, record: ArrayRecord) -> Shared | None:
        """Return the reference of the stored record, or None if it is small enough to travel in its message."""
        known = self._references.get(id(record))
        if known is None and record_bytes(record) >= SHARED_BYTES:
            known = self._references[id(record)] = Shared(self._put(pack_arrays(record)))
            weakref.finalize(record, self._references.pop, id(record), None)
        return known


def pack(message: Message, shared: SharedRecords | None = None) -> tuple[Any, ...]:
    """Return a message as (metadata, error, packed records), one of the last two None. `shared` stores large records."""
    if message.has_error():
        return (message.metadata, message.error, None)
    records: list[tuple[str, Any]] = []
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            records.append((name, (shared.reference(record) if shared else None) or pack_arrays(record)))
        else:
            records.append((name, record))
    return (message.metadata, None, records)


def unpack(parts: tuple[Any, ...], fetch: Callable[[Shared], PackedArrays] | None = None) -> Message:
    """Return the message that `pack` has packed. `fetch` reads a record from the object store."""
    metadata, error, records = parts
    if error is not None:
        return Message(metadata=metadata, error=error)  # type: ignore[call-overload]  # a private form of Flower
    content = RecordDict()
    for name, record in records:
        packed: Any = fetch(record) if isinstance(record, Shared) and fetch else record
        content[name] = unpack_arrays(packed) if isinstance(packed, list) else packed
    return Message(metadata=metadata, content=content)  # type: ignore[call-overload]


def pack_sum(sum: PartialSum) -> PackedSum:
    """Return a partial sum without its records, and its packed records by name."""
    new = {NEW: sum.new} if sum.new is not None else {}
    return replace(sum, records={}, new=None), {name: pack_arrays(record) for name, record in {**sum.records, **new}.items()}


def unpack_sum(packed: PackedSum) -> PartialSum:
    """Return the partial sum that `pack_sum` has packed."""
    sum, records = packed
    unpacked = {name: unpack_arrays(record) for name, record in records.items()}
    new = unpacked.pop(NEW, None)
    return replace(sum, records=unpacked, new=new)


def sum_size(packed: PackedSum) -> int:
    """Return the size of a packed sum's arrays in bytes."""
    return sum(data.nbytes for record in packed[1].values() for *_, data in record)


def size(parts: tuple[Any, ...]) -> int:
    """Return the size of the arrays in a packed message in bytes, without shared records."""
    return sum(data.nbytes for _, record in parts[2] or () if isinstance(record, list) for *_, data in record)
