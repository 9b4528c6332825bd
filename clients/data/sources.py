"""The sources that images are read from: files, torchvision, packages. What was read is cached."""

import gzip
import io
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fedloom.clients.data import listing

Pixels = NDArray[Any]  # inputs: images of uint8, uint16 or float32; float32 numbers; int64 tokens
Labels = NDArray[Any]  # targets: int64 classes or next tokens, float32 numbers
Positions = NDArray[np.int64]

OFFICIAL = ("train", "test")
WHOLE = ("all",)


class Source(Protocol):
    """A place that may have a domain, such as a file. `folder` is the data folder in all methods.

    Attributes:
        parts: "train" and "test", or only "all".
    """

    parts: ClassVar[tuple[str, ...]]

    def origin(self, folder: Path) -> str:
        """Return the place for messages: a path below the data folder, or the name of a package."""
        ...

    def found(self, folder: Path) -> bool:
        """Return whether the place exists, so that the domain can be read."""
        ...

    def state(self, folder: Path) -> str:
        """Return a digest of the domain's files, to detect changes; "" for a package."""
        ...

    def labels(self, folder: Path, part: str) -> Labels:
        """Return the targets of all examples of a part: int64 [n] classes from 0, or as schema.Schema says."""
        ...

    def images(self, folder: Path, part: str, index: Positions) -> Pixels | Iterable[Pixels]:
        """Return some inputs of a part.

        Args:
            folder: The data folder.
            part: One of `parts`.
            index: The positions of the examples, int64 [n].

        Returns:
            Images [n, h, w] (grey) or [n, h, w, c], an iterable of images if their sizes differ, or inputs [n, ...] of
                another kind.
        """
        ...


@dataclass(frozen=True)
class Idx:
    """The four files of the MNIST family in NAME/raw, gzipped or unpacked. Implements `Source`."""

    name: str
    parts: ClassVar[tuple[str, ...]] = OFFICIAL
    prefixes: ClassVar[dict[str, str]] = {"train": "train", "test": "t10k"}

    def origin(self, folder: Path) -> str:
        return str(folder / self.name / "raw")

    def found(self, folder: Path) -> bool:
        kinds = ("images-idx3", "labels-idx1")
        return all(self._path(folder, part, kind).is_file() for part in self.parts for kind in kinds)

    def state(self, folder: Path) -> str:
        kinds = ("images-idx3", "labels-idx1")
        return " ".join(listing.state(self._path(folder, part, kind)) for part in self.parts for kind in kinds)

    def labels(self, folder: Path, part: str) -> Labels:
        path = self._path(folder, part, "labels-idx1")
        return _idx(path, listing.state(path)).astype(np.int64)

    def images(self, folder: Path, part: str, index: Positions) -> Pixels:
        path = self._path(folder, part, "images-idx3")
        return _idx(path, listing.state(path))[index]

    def _path(self, folder: Path, part: str, kind: str) -> Path:
        path = folder / self.name / "raw" / f"{self.prefixes[part]}-{kind}-ubyte"
        return path if path.is_file() else path.with_name(f"{path.name}.gz")


@dataclass(frozen=True)
class Arrays:
    """An npz file with X_train [n, h, w] or [n, h, w, 3], y_train [n], X_test and y_test, all uint8.

    Implements `Source`.
    """

    file: str
    parts: ClassVar[tuple[str, ...]] = OFFICIAL

    def origin(self, folder: Path) -> str:
        return str(folder / self.file)

    def found(self, folder: Path) -> bool:
        return (folder / self.file).is_file()

    def state(self, folder: Path) -> str:
        return listing.state(folder / self.file)

    def labels(self, folder: Path, part: str) -> Labels:
        return _member(folder / self.file, f"y_{part}", self.state(folder)).astype(np.int64)

    def images(self, folder: Path, part: str, index: Positions) -> Pixels:
        return _member(folder / self.file, f"X_{part}", self.state(folder))[index]


@dataclass(frozen=True)
class Sheets(Arrays):
    """An npz file of JPEG sheets train_00, ... with 40 x 25 tiles of 32 x 32 pixels, of which `size` x `size` are used."""

    size: int = 32

    def images(self, folder: Path, part: str, index: Positions) -> Pixels:
        images = np.empty((len(index), self.size, self.size, 3), np.uint8)
        (sheets, tile_numbers), state = np.divmod(index, 1000), self.state(folder)
        for number in np.unique(sheets):
            in_sheet = sheets == number
            tiles = _sheet(folder / self.file, f"{part}_{number:02d}", state)
            images[in_sheet] = tiles[tile_numbers[in_sheet], : self.size, : self.size]
        return images


@dataclass(frozen=True)
class Torchvision:
    """A data set class of torchvision and its `files`. `by_split`: it takes split=, and its channels come first.

    Implements `Source`. CIFAR's original files are pickles. torchvision reads them only if their MD5 sums are in its list.
    """

    name: str
    files: tuple[str, ...]
    by_split: bool = False
    parts: ClassVar[tuple[str, ...]] = OFFICIAL

    def origin(self, folder: Path) -> str:
        return f"{folder / self.files[0]} (torchvision)"

    def found(self, folder: Path) -> bool:
        return all((folder / file).exists() for file in self.files)

    def state(self, folder: Path) -> str:
        return " ".join(listing.state(folder / file) for file in self.files)

    def fetch(self, folder: Path) -> None:
        """Download files that are missing in the folder. Raises torchvision's OSError or RuntimeError."""
        folder.mkdir(parents=True, exist_ok=True)
        for part in self.parts:
            self.open(folder, part, download=True)

    def open(self, folder: Path, part: str, download: bool = False) -> Any:
        """Return torchvision's data set object for a part."""
        from torchvision import datasets

        which = {"split": part} if self.by_split else {"train": part == "train"}
        return getattr(datasets, self.name)(folder, download=download, **which)

    def labels(self, folder: Path, part: str) -> Labels:
        return _opened(self, folder, part, self.state(folder))[1]

    def images(self, folder: Path, part: str, index: Positions) -> Pixels:
        return _opened(self, folder, part, self.state(folder))[0][index]


@lru_cache(maxsize=16)
def _idx(path: Path, state: str) -> Pixels:
    """Read an idx file of bytes: magic number 0, 0, 8, d; d sizes as big-endian int32; the bytes."""
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} is not an idx file of bytes")
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">i4", dimensions, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


@lru_cache(maxsize=16)
def _member(path: Path, name: str, state: str) -> Pixels:
    with np.load(path, allow_pickle=False) as archive:
        return archive[name]


@lru_cache(maxsize=64)
def _sheet(path: Path, name: str, state: str) -> Pixels:
    """Return the 1000 tiles of a sheet, uint8 [1000, 32, 32, 3] (3 MB)."""
    from PIL import Image

    with np.load(path, allow_pickle=False) as archive:
        jpeg = archive[name].tobytes()
    grid = np.asarray(Image.open(io.BytesIO(jpeg))).reshape(40, 32, 25, 32, 3)
    return grid.swapaxes(1, 2).reshape(1000, 32, 32, 3)


@lru_cache(maxsize=4)
def _opened(source: Torchvision, folder: Path, part: str, state: str) -> tuple[Pixels, Labels]:
    dataset = source.open(folder, part)
    pixels = np.asarray(dataset.data)
    labels = dataset.labels if source.by_split else dataset.targets
    return pixels.transpose(0, 2, 3, 1) if source.by_split else pixels, np.asarray(labels, np.int64)
