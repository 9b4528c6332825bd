"""Domains of the user's own, by configuration alone: folders of images, npz files, data sets on disk, functions."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from clients.data import listing
from clients.data.arrays import Named, as_pixels, check_image, image_of, in_order, numbered
from clients.data.sources import OFFICIAL, WHOLE, Labels, Pixels, Positions
from conf.errors import UserError
from conf.plugins import call, is_reference, outside, parameters, told

MOST_HELD = 16  # domains

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
MEMBERS = {  # of npz files, in small letters
    "train": (("x_train", "y_train"), ("train_images", "train_labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
    "all": (("x", "y"), ("images", "labels")),
}
IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img", "x"), ("label", "labels", "y", "target")

Select = Callable[[Positions], Pixels | Iterable[Pixels]]


@dataclass(frozen=True, eq=False)
class Contents:
    """A domain as it was found. By part (train and test, or all): int64 labels, and the images at given positions.

    `names`: of its `classes`, in their order; none if they are numbers. `files`: those that are opened one by one.
    """

    labels: Mapping[str, Labels]
    images: Mapping[str, Select]
    classes: int
    names: tuple[str, ...]
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Own:
    """A source whose domain is found by its own name (`images:PATH`, ...), wherever the data folder is."""

    domain: str
    parts: ClassVar[tuple[str, ...]] = WHOLE

    def origin(self, folder: Path) -> str:
        return _origin(self.domain)

    def found(self, folder: Path) -> bool:
        return True

    def state(self, folder: Path) -> str:
        return state_of(self.domain)

    def labels(self, folder: Path, part: str) -> Labels:
        return contents(self.domain).labels[part]

    def images(self, folder: Path, part: str, index: Positions) -> Pixels | Iterable[Pixels]:
        return contents(self.domain).images[part](index)


@dataclass(frozen=True)
class OwnSplit(Own):
    """One that has a test part of its own."""

    parts: ClassVar[tuple[str, ...]] = OFFICIAL


def short(domain: str) -> str:
    """A domain's name in tables: of a path its last part, of `module:attribute` the attribute."""
    kind, _, rest = domain.partition(":")
    if kind in READERS:
        path = Path(os.path.abspath(rest))
        return (path.stem if kind == "npz" else path.name) or kind
    return rest.rpartition(".")[2] if is_reference(domain) else domain


def absolute(domain: str) -> str:
    """The same domain with a path that means the same wherever a process was started."""
    kind, _, rest = domain.partition(":")
    return f"{kind}:{_path(rest)}" if kind in READERS and rest else domain


def _path(text: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(text)))  # as it is where there is no such user


def state_of(domain: str) -> str:
    """What changes with the domain's files, or, where a function gives it, with the run."""
    kind, _, rest = domain.partition(":")
    return listing.state(_path(rest)) if kind in READERS and rest else listing.run_now()


def contents(domain: str) -> Contents:
    """What is in a domain of the user's own, read once as long as its files are as they were.

    UserError for one that is not there, is damaged, does not fit, or has other classes than before in one run.
    """
    state, run, before = state_of(domain), listing.run_now(), _CONTENTS.get(domain)
    if before and before[0] == state:
        return before[2]
    found = _read(domain)
    if before and run and before[1] == run and (before[2].classes, before[2].names) != (found.classes, found.names):
        raise _wrong(domain, "has other classes than when the run began; put them back, or start a new run")
    _CONTENTS[domain] = state, run, found
    while len(_CONTENTS) > MOST_HELD:
        _CONTENTS.popitem(last=False)
    return found


_CONTENTS: OrderedDict[str, tuple[str, str, Contents]] = OrderedDict()  # with their state, and the run that read them


def _read(domain: str) -> Contents:
    kind, _, rest = domain.partition(":")
    if kind not in READERS or not rest:
        return _function(domain)
    path = _path(rest)
    if not path.exists():
        raise UserError(f"domain '{short(domain)}': there is no {path}; correct the path in '{domain}'")
    with legible(domain):
        return READERS[kind](path, domain)


def check_files(domain: str) -> None:
    """UserError naming the first image file of the user's own domain that is cut, damaged or too large to be opened."""
    if domain.partition(":")[0] in READERS:
        _check_files(domain, state_of(domain))


@lru_cache(maxsize=16)
def _check_files(domain: str, state: str) -> None:
    from PIL import Image

    for file in contents(domain).files:
        with legible(domain, str(file)), Image.open(file) as image:
            check_image(image)


@contextmanager
def legible(domain: str, place: str = "") -> Any:
    """What fails in reading becomes a UserError in one line that names the domain and the place (empty: its origin)."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        where = f"domain '{short(domain)}': {place or _origin(domain)}"
        raise UserError(f"{where} cannot be read ({told(error)}); put an intact copy there or remove it") from error


def _origin(domain: str) -> str:
    kind, _, rest = domain.partition(":")
    return rest if kind in READERS else domain


def _wrong(domain: str, why: str) -> UserError:
    return UserError(f"domain '{short(domain)}': {_origin(domain)} {why}")


def _folder(path: Path, domain: str) -> Contents:
    """Images in class folders, below train and test or not."""
    if not path.is_dir():
        raise _wrong(domain, "is no folder; give one that has a folder of images for each class")
    split = all((path / part).is_dir() for part in OFFICIAL)
    if not split and (path / "train").is_dir() and not _files(path / "train", domain, deep=False):
        raise _wrong(domain, f"has a folder train but no folder test; add it, or take images:{path / 'train'} alone")
    roots = {part: path / part for part in OFFICIAL} if split else {WHOLE[0]: path}
    found = {part: _classes(root, domain) for part, root in roots.items()}
    names = in_order(name for classes in found.values() for name in classes)
    if not names:
        raise _wrong(domain, "has no images in class folders (such as cats/1.png)")
    files = {part: [file for name in names for file in classes.get(name, [])] for part, classes in found.items()}
    labels = {
        part: np.repeat(np.arange(len(names)), [len(classes.get(name, [])) for name in names])
        for part, classes in found.items()
    }

    def reader(part: str) -> Select:
        return lambda index: (_decoded(files[part][place], domain) for place in index)

    return Contents(labels, {part: reader(part) for part in files}, len(names), names, tuple(chain(*files.values())))


def _classes(root: Path, domain: str) -> dict[str, list[Path]]:
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    found = {folder.name: _files(folder, domain, deep=True) for folder in folders}
    return {name: files for name, files in found.items() if files}


def _files(folder: Path, domain: str, deep: bool) -> list[Path]:
    """The images in a folder that are not hidden. UserError for what bears an image's name and is none."""
    named = (path for path in (folder.rglob("*") if deep else folder.iterdir()) if path.suffix.lower() in SUFFIXES)
    found = sorted(path for path in named if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    for path in found:
        if not path.is_file():
            raise UserError(f"domain '{short(domain)}': {path} is no regular file, though its name is an image's; remove it")
    return found


def _decoded(file: Path, domain: str) -> Pixels:
    from PIL import Image

    with legible(domain, str(file)), Image.open(file) as image:
        return image_of(image)


def _npz(path: Path, domain: str) -> Contents:
    """Arrays of images and labels, of train and test or of all."""
    if not path.is_file():
        raise _wrong(domain, "is no regular file; takes an npz file of images and labels (numpy.savez)")
    archive = np.load(path, allow_pickle=False)
    if isinstance(archive, np.ndarray):
        raise _wrong(domain, "is a single array; takes an npz file of images and labels (numpy.savez)")
    with archive:
        members = {name.lower(): name for name in archive.files}
        chosen = {part: pair for part, pairs in MEMBERS.items() for pair in pairs if set(pair) <= members.keys()}
        if not ({"train", "test"} <= chosen.keys() or "all" in chosen):
            raise _wrong(domain, f"has {', '.join(archive.files)}; takes x and y, or x_train, y_train, x_test and y_test")
        parts = OFFICIAL if "train" in chosen and "test" in chosen else WHOLE
        arrays = {part: tuple(archive[members[name]] for name in chosen[part]) for part in parts}
    return _of_arrays({part: Named(*pair) for part, pair in arrays.items()}, domain)


def _of_arrays(found: Mapping[str, Named], domain: str) -> Contents:
    """The contents of arrays, checked."""
    with _fitting(domain):
        labels, classes, names = numbered(found)
        pixels = {part: as_pixels(one.images, len(labels[part])) for part, one in found.items()}

    def reader(part: str) -> Select:
        held = pixels[part]
        return lambda index: held[index] if isinstance(held, np.ndarray) else [held[place] for place in index]

    return Contents(labels, {part: reader(part) for part in pixels}, classes, names)


@contextmanager
def _fitting(domain: str) -> Any:
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise _wrong(domain, str(error)) from None


def _dataset(path: Path, domain: str) -> Contents:
    """A Hugging Face data set that save_to_disk has written: its columns are found by their types, else by their names."""
    from datasets import Array2D, Array3D, ClassLabel, DatasetDict, Image, load_from_disk

    if not path.is_dir():
        raise _wrong(domain, "is no folder; takes one that save_to_disk has written")
    loaded: Any = load_from_disk(str(path))
    splits = {str(name): rows for name, rows in loaded.items()} if isinstance(loaded, DatasetDict) else {WHOLE[0]: loaded}
    if len(splits) > 1 and not set(OFFICIAL) <= splits.keys():
        raise _wrong(domain, f"has the splits {', '.join(splits)}; takes train and test, or one alone")
    parts = {part: splits[part] for part in OFFICIAL} if len(splits) > 1 else {WHOLE[0]: next(iter(splits.values()))}
    features = next(iter(parts.values())).features
    image = _column(features, (Image, Array2D, Array3D), IMAGE_COLUMNS)
    label = _column(features, (ClassLabel,), LABEL_COLUMNS)
    if image is None or label is None:
        raise _wrong(domain, f"has the columns {', '.join(features)}; takes one of images and one of class labels")

    def named(rows: Any) -> Named:
        kind = rows.features[label]
        return Named(None, np.asarray(rows[label][:]), tuple(kind.names) if isinstance(kind, ClassLabel) else ())

    with _fitting(domain):
        labels, classes, names = numbered({part: named(rows) for part, rows in parts.items()})

    def reader(part: str) -> Select:
        rows = parts[part].select_columns([image])

        def decoded(place: int) -> Pixels:
            with legible(domain, f"{path}, row {place} of {part},"):
                return image_of(rows[place][image])

        return lambda index: (decoded(int(place)) for place in index)

    return Contents(labels, {part: reader(part) for part in parts}, classes, names)


def _column(features: Mapping[str, Any], kinds: tuple[type, ...], names: tuple[str, ...]) -> str | None:
    typed = [name for name, feature in features.items() if isinstance(feature, kinds)]
    return next(iter([name for name in typed if name in names] + typed + [name for name in names if name in features]), None)


def _function(domain: str) -> Contents:
    """What a function (or class) of an outside package gives; asked twice if it takes `split` or `train`."""
    found = lookup(domain)
    if not callable(found):
        raise UserError(f"domain '{domain}': is of the type {type(found).__name__}, takes a function that gives images")
    taken = {one.name for one in parameters(found)[0]}
    if "split" in taken:
        made: Any = {part: call(found, {}, {"split": part}, domain, "domain") for part in OFFICIAL}
    elif "train" in taken:
        made = {part: call(found, {}, {"train": part == "train"}, domain, "domain") for part in OFFICIAL}
    else:
        made = call(found, {}, {}, domain, "domain")
    parts = made if isinstance(made, Mapping) else {WHOLE[0]: made}
    if set(parts) not in ({*OFFICIAL}, {*WHOLE}):
        raise _wrong(domain, f"gave {', '.join(map(str, parts)) or 'nothing'}; takes train and test")
    with legible(domain), _fitting(domain):
        return _of_arrays({part: Named.of(one) for part, one in parts.items()}, domain)


def lookup(domain: str, known: Iterable[str] = ()) -> Any:
    """What a domain's name stands for in an outside package; UserError with the nearest name for a name of nothing."""
    return outside("domain", domain, [*known, *(f"{kind}:PATH" for kind in READERS)], "domain")


READERS: dict[str, Callable[[Path, str], Contents]] = {"images": _folder, "npz": _npz, "dataset": _dataset}
