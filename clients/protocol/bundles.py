"""Bundle the arrays of a message, as long as it travels through Flower's SuperLink (flwr 1.41).

Flower sends every array as parts of its own, and each part is a request of some twenty milliseconds at the SuperLink: a
ResNet-18 has 244 of them. A bundle is the length of an index, the index (JSON), and all arrays' bytes. The bundles of a
message with up to MOST_WHOLE bytes are values of config records, of one part each. Others are arrays, of three parts.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import make_message

from fedloom.clients.protocol.messages import ORDER

BUNDLE = "fedloom.bundle"  # name of the record, of its array, and of the array's encoding
BUNDLED = "bundled"  # down, in the order: the reply may be bundled
LENGTH = struct.Struct("<Q")
Bundle = ArrayRecord | ConfigRecord
MOST_INDEX = 4 << 20  # bytes of a message's indices; reading one needs sixty times its bytes
MOST_WHOLE = 1 << 20  # config records of a message may have 16 MiB (server.flower.unfolding), with the indices
MOST_ENTRIES = 100_000  # arrays of a bundle, and records without arrays


def bundled_orders(messages: Iterable[Message]) -> list[Message]:
    """Return messages to sites with each array record in a bundle of its own: what several sites get travels once."""
    bundles: dict[tuple[str, int, bool], Bundle] = {}  # by the record's name, which is in the bundle, its identity, and size

    def bundled(message: Message) -> Message:
        records, arrays = dict[str, Any](message.content), dict(message.content.array_records)
        small = _is_small(arrays)
        for name, record in arrays.items():
            if (key := (name, id(record), small)) not in bundles:
                bundles[key] = _bundle({name: record}, small)
            records[name] = bundles[key]
        if isinstance(order := records.get(ORDER), ConfigRecord):
            records[ORDER] = ConfigRecord({**order, BUNDLED: True})
        return make_message(message.metadata, content=RecordDict(records))

    return [bundled(message) for message in messages]


def bundled_reply(content: RecordDict) -> RecordDict:
    """Return a reply's content with all arrays in one bundle."""
    if not (arrays := dict(content.array_records)):
        return content
    others = {name: record for name, record in content.items() if name not in arrays}
    return RecordDict({**others, BUNDLE: _bundle(arrays, _is_small(arrays))})


def may_bundle(content: RecordDict) -> bool:
    """Return whether the sender of an order reads bundles."""
    return content.config_records.get(ORDER, {}).get(BUNDLED) is True


def unbundled(content: RecordDict) -> RecordDict:
    """Return a message's content with the records of its bundles.

    Raises ValueError or TypeError for a malformed bundle, and ValueError for a record that comes twice.
    """
    records, room = list[tuple[str, Any]](), MOST_INDEX
    for name, record in content.items():
        if (bundle := _bytes_of(record)) is None:
            records.append((name, record))
            continue
        data = memoryview(bundle)
        room -= (size := _index_bytes(data, room))
        records.extend(_records(data, size).items())
    if len(dict(records)) < len(records):
        raise ValueError("a record comes twice")
    return RecordDict(dict(records))


def _is_small(records: Mapping[str, ArrayRecord]) -> bool:
    return sum(len(array.data) for arrays in records.values() for array in arrays.values()) <= MOST_WHOLE


def _bundle(records: Mapping[str, ArrayRecord], small: bool) -> Bundle:
    index = [[record, name, array.dtype, list(array.shape), array.stype, len(array.data)]
             for record, arrays in records.items() for name, array in arrays.items()]  # fmt: skip
    empty = [record for record, arrays in records.items() if not arrays]
    head = json.dumps([index, empty], separators=(",", ":")).encode()
    data = b"".join(
        [LENGTH.pack(len(head)), head, *(array.data for arrays in records.values() for array in arrays.values())]
    )
    if small:
        return ConfigRecord({BUNDLE: data})
    return ArrayRecord({BUNDLE: Array("uint8", (len(data),), BUNDLE, data)})


def _bytes_of(record: Any) -> bytes | None:
    """Return the bytes of a bundle, or None for another record."""
    if isinstance(record, ConfigRecord) and isinstance(data := record.get(BUNDLE), bytes):
        return data if len(record) == 1 else None
    if isinstance(record, ArrayRecord) and [array.stype for array in record.values()] == [BUNDLE]:
        return next(iter(record.values())).data
    return None


def _index_bytes(data: memoryview, most: int) -> int:
    if len(data) < LENGTH.size:
        raise ValueError("a bundle has no index")
    (size,) = LENGTH.unpack_from(data)
    if size > min(most, len(data) - LENGTH.size):
        raise ValueError("a bundle's index is too long")
    return size


def _records(data: memoryview, size: int) -> dict[str, ArrayRecord]:
    """Read a bundle with an index of `size` bytes."""
    begin = LENGTH.size + size
    index, empty = json.loads(bytes(data[LENGTH.size : begin]))
    if len(index) + len(empty) > MOST_ENTRIES:
        raise ValueError(f"a bundle has more than {MOST_ENTRIES} arrays")
    if not all(isinstance(name, str) for name in empty):
        raise ValueError("a bundle's index is malformed")
    records = {name: ArrayRecord() for name in empty}
    for record, name, dtype, shape, stype, length in index:
        if not all(isinstance(text, str) for text in (record, name, dtype, stype)):
            raise ValueError("a bundle's index is malformed")
        if type(length) is not int or not 0 <= length <= len(data) - begin or stype == BUNDLE:
            raise ValueError("a bundle's index is malformed")
        if name in (arrays := records.setdefault(record, ArrayRecord())):
            raise ValueError(f"an array comes twice in record '{record}'")
        end = begin + length
        arrays[name], begin = Array(dtype, tuple(shape), stype, bytes(data[begin:end])), end  # raises for a wrong shape
    if begin != len(data):
        raise ValueError("a bundle has more bytes than its index says")
    return records
