"""Folders of images: one folder per class, with or without train and test above them. Links are followed."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from fedloom.clients.data.arrays import as_pixels, image_of, in_order
from fedloom.clients.data.found import Contents, Select, legible, short, wrong
from fedloom.clients.data.inputs import levels_of
from fedloom.clients.data.schema import BYTE, UNIT, WORD, Schema
from fedloom.clients.data.sources import OFFICIAL, WHOLE, Pixels
from fedloom.clients.data.tiff import read_channels
from fedloom.conf.errors import UserError, plain
from fedloom.conf.formatting import count

DEEP = {".pgm", ".png", ".tif", ".tiff"}  # endings of images that may have more than 8 bits per channel
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
MOST_SHOWN = 10  # endings, or class folders, named in a message
MOST_ENDING = 20  # letters of an ending


@dataclass
class _Search:
    """The folders visited while reading a domain, and the files left out."""

    domain: str
    entered: dict[tuple[int, int], Path] = field(default_factory=dict)
    endings: Counter[str] = field(default_factory=Counter)  # of files in class folders
    hidden: int = 0
    outside: int = 0  # images outside the class folders
    empty: list[str] = field(default_factory=list)
    other_folders: list[str] = field(default_factory=list)

    def words(self) -> tuple[str, ...]:
        """Describe what is left out."""
        endings = [_of_ending(number, ending) for ending, number in self.endings.most_common()]
        return (
            *_shown(endings, "other endings"),
            *([f"{count(self.hidden, 'hidden image')}"] if self.hidden else []),
            *([f"{count(self.outside, 'image')} outside the class folders"] if self.outside else []),
            *_shown([f"the class '{plain(name)}', whose folder has no images" for name in self.empty], "more such classes"),
            *_shown([f"the folder '{plain(name)}' next to train and test" for name in self.other_folders], "more folders"),
        )


def _of_ending(number: int, ending: str) -> str:
    return f"{count(number, 'file')} {f'ending in {plain(ending)[:MOST_ENDING]}' if ending else 'without an ending'}"


def _shown(items: list[str], rest_name: str) -> list[str]:
    rest = len(items) - MOST_SHOWN
    return [*items[:MOST_SHOWN], *([f"{rest} {rest_name}"] if rest > 0 else [])]


def read_folder(path: Path, domain: str) -> Contents:
    """Read the classes, images and labels of images:PATH.

    Raises UserError for unreadable files, loops of links, or no images.
    """
    if not path.is_dir():
        raise wrong(domain, "is not a folder. Name a folder that has one folder of images per class.")
    split, search = all((path / part).is_dir() for part in OFFICIAL), _Search(domain)
    if not split and (path / "train").is_dir() and not _has_images(path / "train"):
        raise wrong(domain, f"has a folder train but no folder test. Add it, or use only images:{path / 'train'}.")
    roots = {part: path / part for part in OFFICIAL} if split else {WHOLE[0]: path}
    if split:
        search.other_folders = [folder.name for folder in _folders(path) if folder.name not in OFFICIAL]
        search.outside += sum(_is_image(folder) for folder in path.iterdir())
    class_files = {part: _classes(root, search) for part, root in roots.items()}
    names = in_order(name for classes in class_files.values() for name in classes)
    search.empty = [name for name in dict.fromkeys(search.empty) if name not in names]
    if not names:
        left = f"; left out: {', '.join(search.words())}" if search.words() else ""
        raise wrong(domain, f"has no images in class folders (such as cats/1.png){left}")
    files = {part: [file for name in names for file in classes.get(name, [])] for part, classes in class_files.items()}
    labels = {
        part: np.repeat(np.arange(len(names)), [len(classes.get(name, [])) for name in names])
        for part, classes in class_files.items()
    }

    def reader(part: str) -> Select:
        return lambda index: (_decoded(files[part][position], domain) for position in index)

    images, opened = {part: reader(part) for part in files}, tuple(chain(*files.values()))
    schema = Schema(levels=_levels(opened, domain))
    return Contents(labels, images, len(names), names, opened, search.words(), schema)


def _levels(files: tuple[Path, ...], domain: str) -> int:
    """Return BYTE, or WORD if any file has more than 8 bits per channel, or UNIT if any has floats. Reads only headers."""
    levels = {_levels_of(file, domain) for file in files if file.suffix.lower() in DEEP}
    return UNIT if UNIT in levels else WORD if WORD in levels else BYTE


def _levels_of(file: Path, domain: str) -> int:
    from PIL import Image

    with legible(domain, str(file)):
        if file.suffix.lower() == ".png":
            with file.open("rb") as opened:
                header = opened.read(25)
            return WORD if header[12:16] == b"IHDR" and header[24] == 16 else BYTE
        if (channels := read_channels(file)) is not None:
            return WORD if _is_deep(channels) else levels_of(as_pixels(channels[None], 1))
        with Image.open(file) as image:
            return WORD if image.mode.startswith("I;16") else BYTE


def _is_deep(channels: Pixels) -> bool:
    """Return whether channels are whole numbers of over 8 bits, from 0 to WORD: files of one camera share this range."""
    return channels.dtype.kind in "iu" and channels.dtype.itemsize > 1 and 0 <= channels.min() <= channels.max() <= WORD


def _folders(root: Path) -> list[Path]:
    return sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _has_images(folder: Path) -> bool:
    return any(_is_image(path) for path in folder.iterdir())


def _classes(root: Path, search: _Search) -> dict[str, list[Path]]:
    _enter(root, search)
    folders = _folders(root)
    for path in set(root.iterdir()) - set(folders):
        if _is_image(path):
            search.outside += 1
        elif not path.name.startswith(".") and not path.is_dir():
            search.endings[path.suffix.lower()] += 1
    images = {folder.name: sorted(_images(folder, search)) for folder in folders}
    search.empty += [name for name, files in images.items() if not files]
    return {name: files for name, files in images.items() if files}


def _images(folder: Path, search: _Search) -> Iterator[Path]:
    """Yield the images in a folder and below. Raises UserError for an image's name that is not a regular file."""
    _enter(folder, search)
    for path in folder.iterdir():
        hidden = path.name.startswith(".")
        if path.is_dir() and path.suffix.lower() not in SUFFIXES:
            if not hidden:
                yield from _images(path, search)
        elif hidden:
            search.hidden += path.suffix.lower() in SUFFIXES
        elif path.suffix.lower() not in SUFFIXES:
            search.endings[path.suffix.lower()] += 1
        elif path.is_file():
            yield path
        else:
            fault = f"{path} has the name of an image, but is not a regular file; remove it"
            raise UserError(f"domain '{short(search.domain)}': {fault}")


def _enter(folder: Path, search: _Search) -> None:
    """Raise UserError for a folder that was already read under another path: a loop of links, or duplicate images."""
    seen = os.stat(folder)
    before = search.entered.setdefault((seen.st_dev, seen.st_ino), folder)
    if before != folder:
        fault = f"{folder} is a link to {before}, so the same images would count twice; remove one of the two"
        raise UserError(f"domain '{short(search.domain)}': {fault}")


def _decoded(file: Path, domain: str) -> Pixels:
    from PIL import Image

    with legible(domain, str(file)):
        if (channels := read_channels(file)) is not None:
            return image_of(channels.astype(np.uint16) if _is_deep(channels) else channels)
        with (
            file.open("rb") as opened,
            Image.open(opened) as image,
        ):  # by its path, Pillow 13 mixes the rows of a turned TIFF
            return image_of(image)
