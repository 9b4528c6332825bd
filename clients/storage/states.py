"""States as safetensors files. Each is written to a temporary file and renamed, so a reader never sees half a file."""

import contextlib
import functools
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from fedloom.conf.errors import UserError
from fedloom.fusion.flat import Layout, flat_of, flattened, layout_of_shapes
from fedloom.fusion.state import State

_FLAT_TYPES = {"F32": torch.float32, "I64": torch.int64}
MOST_HEADER = 2**20  # bytes of a header that is looked up among known ones
HEADER = 8  # bytes that hold the length of a safetensors file's header


def round_file(root: Path, name: str, round: int) -> Path:
    """Return the path of the file for the state of `name` (a site) after a round."""
    return root / name / f"round-{round:06d}.safetensors"


def staged_file(root: Path, name: str) -> Path:
    """Return the path of the file in which a worker leaves what the site `name` contributes to the current round."""
    return root / f"{name}.safetensors"


def staged_files(root: Path, name: str) -> list[Path]:
    """Return what workers have left of a site, finished or not."""
    file = staged_file(root, name).name
    return [path for path in sorted(root.glob("*")) if path.name == file or path.name.startswith(f".{file}-")]


def write_bytes(path: Path, content: bytes, durable: bool = True, private: bool = False) -> None:
    """Replace the file at `path` in one step: write a temporary file, fsync (if `durable`), rename.

    `private`: only the user may read the file.
    """
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with _new_file(temporary, private) as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # a full disk, for example
            error.filename = str(path)
        with contextlib.suppress(OSError):  # the first error counts
            temporary.unlink(missing_ok=True)
        raise


def _new_file(path: Path, private: bool) -> BinaryIO:
    """Open a file that does not exist for writing, and create its folder if it is missing."""
    opener = _private if private else None
    try:
        return open(path, "xb", opener=opener)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "xb", opener=opener)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def safetensors_of(state: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a safetensors file with this state; equal states have equal bytes."""
    if (whole := flat_of(state)) is not None:
        return b"".join((_header(whole.layout, whole.vector.dtype), whole.vector.contiguous().numpy().data))
    return save({name: state[name].detach().cpu().contiguous() for name in sorted(state)}, metadata={"format": "pt"})


@functools.lru_cache(maxsize=64)
def _header(layout: Layout, dtype: torch.dtype) -> bytes:
    """Return what a safetensors file of this layout has before its numbers."""
    content = save({name: torch.empty(shape, dtype=dtype) for name, shape in layout.shapes}, metadata={"format": "pt"})
    return content[: HEADER + int.from_bytes(content[:HEADER], "little")]


def write_state(path: Path, state: Mapping[str, Tensor], **metadata: str) -> None:
    """Write a state (any shapes and dtypes) with string metadata to a safetensors file."""
    write_bytes(path, _packed(state, metadata))


def write_private_state(path: Path, state: Mapping[str, Tensor], **metadata: str) -> None:
    """Write a state to a safetensors file that only the user may read."""
    write_bytes(path, _packed(state, metadata), private=True)


def write_own_state(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a state that only the user may read, with its sha256, which `read_own_state` checks."""
    write_private_state(path, state, sha256=_sha256(state))


def read_own_state(path: Path) -> State:
    """Return the state that `write_own_state` wrote to a file. Raises UserError if it is missing or was changed since."""
    state, noted = read_state(path), read_metadata(path).get("sha256")
    if noted is not None and noted != _sha256(state):  # earlier versions wrote none
        raise UserError(f"{path}: was changed after it was written: its sha256 differs")
    return state


def _sha256(state: Mapping[str, Tensor]) -> str:
    return hashlib.sha256(safetensors_of(state)).hexdigest()


def _packed(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    return _ordered(save(tensors, metadata={"format": "pt", **metadata}))


def _ordered(packed: bytes) -> bytes:
    """Sort a file's metadata, which safetensors writes in random order."""
    end = HEADER + int.from_bytes(packed[:HEADER], "little")
    header = json.loads(packed[HEADER:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // HEADER) * HEADER)  # data begin at a multiple of 8
    return len(text).to_bytes(HEADER, "little") + text + packed[end:]


def state_in(content: bytes) -> State:
    """Return the state in the bytes of a safetensors file, as a flat state where it can be one. Raises SafetensorError."""
    begin = HEADER + int.from_bytes(content[:HEADER], "little")
    if begin <= MOST_HEADER and (known := _layout(content[:begin])) is not None:
        layout, dtype = known
        if 0 < len(content) - begin == sum(layout.sizes) * dtype.itemsize:
            return layout.state(torch.frombuffer(bytearray(memoryview(content)[begin:]), dtype=dtype))
    return flattened(dict(sorted(load(content).items())))  # safetensors has no order


@functools.lru_cache(maxsize=64)
def _layout(header: bytes) -> tuple[Layout, torch.dtype] | None:
    """Return the layout that `safetensors_of` writes with this header, and the dtype; None for all other headers."""
    with contextlib.suppress(SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        entries = {name: entry for name, entry in json.loads(header[HEADER:]).items() if name != "__metadata__"}
        (dtype,) = {_FLAT_TYPES[entry["dtype"]] for entry in entries.values()}
        layout = layout_of_shapes(tuple(sorted((name, tuple(entry["shape"])) for name, entry in entries.items())))
        if _header(layout, dtype) == header:
            return layout, dtype
    return None


def read_state(path: Path) -> State:
    """Return the state in a file. Raises UserError for a file that is missing or not in the safetensors format."""
    try:
        return state_in(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: the file does not exist") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: is not a readable safetensors file ({error})") from None


def read_metadata(path: Path) -> dict[str, str]:
    """Return a safetensors file's metadata, without its tensors. Raises UserError for an unreadable file."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


def read_names(path: Path) -> list[str]:
    """Return the names of a safetensors file's tensors. Raises UserError for an unreadable file."""
    with _opened(path) as file:
        return list(file.keys())


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: is not a readable safetensors file ({error})") from None
