"""Convert a user's images and labels to pixels, class numbers from 0, and names of classes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedloom.clients.data.sources import Labels, Pixels
from fedloom.conf.errors import UserError, plain

ANIMATED = ("GIF", "PNG", "WEBP")  # a JPEG of a telephone may have a preview as a second frame
ORIENTATION = 0x0112  # the EXIF tag; 1: upright
CHANNELS = (1, 3)  # of tensors whose channels come first
MOST_CHANNELS = 64
MOST_CLASSES = 100_000
MANY = 20  # from this number of classes on, each must have
MIN_PER_CLASS = 2  # this many images on average


@dataclass(frozen=True, eq=False)
class Labelled:
    """A user's examples. A function of a user may return one.

    Attributes:
        inputs: An array [n, ...], or a list of images. Arrays of images are [n, h, w] or [n, h, w, c]; torch tensors of 1
            or 3 channels also [n, c, h, w].
        targets: Class numbers or names [n], numbers [n] or [n, numbers], or next tokens [n, steps].
        names: Names of the classes, labels or numbers; empty if they have none.
        kind: Of the inputs, one of form.KINDS; empty: what type and shape say.
        task: Of the targets, one of schema.TASKS; empty: what type and shape say.
        columns: Names of the features.
    """

    inputs: Any
    targets: Any
    names: tuple[str, ...] = ()
    kind: str = ""
    task: str = ""
    columns: tuple[str, ...] = ()

    @staticmethod
    def of(source: Any) -> "Labelled":
        """Return the content of `source`: arrays (inputs, targets), an iterator of (image, label), or a torch data set.

        The data set's attribute `classes` becomes the names. Raises ValueError for anything else.
        """
        if isinstance(source, Labelled):
            return source
        if isinstance(source, tuple) and len(source) == 2 and not isinstance(source[0], tuple):
            return Labelled(*source)
        if not isinstance(source, Iterator) and not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise ValueError(f"returned a {type(source).__name__}; takes arrays (images, labels) or a data set of "
                             "(image, label)")  # fmt: skip
        samples = list(source) if isinstance(source, Iterator) else [source[index] for index in range(len(source))]
        if not samples or not all(isinstance(sample, Sequence) and len(sample) == 2 for sample in samples):
            raise ValueError(f"returned {'samples that are not pairs' if samples else 'no samples'}; takes (image, label)")
        names = getattr(source, "classes", None)
        known = tuple(map(str, names)) if isinstance(names, list | tuple) else ()
        if all(np.ndim(label) == 1 for _, label in samples):  # whole batches
            images: Any = [image for batch, _ in samples for image in batch]
            return Labelled(images_of(images), np.concatenate([np.asarray(y) for _, y in samples]), known)
        return Labelled(images_of([image for image, _ in samples]), np.asarray([label for _, label in samples]), known)


def image_of(image: Any) -> Pixels:
    """Convert a PIL image, a torch tensor [c, h, w] or [h, w], or an array to [h, w] or [h, w, c] as as_pixels does.

    Raises ValueError for an image of another form.
    """
    if hasattr(image, "convert"):
        return _converted(image)
    array = np.asarray(image)
    if isinstance(image, torch.Tensor) and array.ndim == 3 and array.shape[0] in CHANNELS:
        array = np.moveaxis(array, 0, -1)
    stack = as_pixels(array[None], 1)
    return stack[0]


def images_of(images: Sequence[Any]) -> list[Pixels]:
    """Convert images as `image_of` does. Images of wide whole numbers share one range: to 255 or 65535."""
    made = [image_of(image) for image in images]
    wide = [index for index, image in enumerate(images) if _is_wide(image)]
    if any(made[index].dtype == np.uint16 for index in wide):
        for index in wide:
            made[index] = made[index].astype(np.uint16)
    return made


def _is_wide(image: Any) -> bool:
    """Return whether an image's type does not say its brightest level: whole numbers other than uint8 and uint16."""
    kind = None if hasattr(image, "convert") else np.asarray(image).dtype
    return kind is not None and kind.kind in "iu" and kind not in (np.uint8, np.uint16)


def check_image(image: Any) -> None:
    """Raise PIL's error, ValueError, or UserError if an opened PIL image is damaged or unusable. Does not decode all of it.

    Reads the checksums of a PNG, and an eighth of the pixels of a JPEG.
    """
    _check_mode(image)
    if image.format in ANIMATED and (frames := getattr(image, "n_frames", 1)) > 1:
        raise UserError(f"{plain(str(image.filename))} has {frames} frames, takes one; save one frame per file")
    if image.format == "PNG":
        image.verify()
    else:
        image.draft(image.mode, (1, 1))
        image.load()


def _check_mode(image: Any) -> None:
    if image.mode in ("I", "F"):
        raise ValueError(f"its PIL mode {image.mode} has no fixed range; save it with 8 or 16 bits")


def _converted(image: Any) -> Pixels:
    image = _upright(image)
    if image.mode.startswith("I;16"):
        return np.asarray(image).astype(np.uint16)
    _check_mode(image)
    grey = image.mode in ("1", "L", "LA", "La")
    return np.asarray((_on_white(image) if image.has_transparency_data else image).convert("L" if grey else "RGB"))


def _upright(image: Any) -> Any:
    """Turn an image as its EXIF orientation says: phones store the pixels as the sensor has them."""
    from PIL import ImageOps

    image.load()  # turns a TIFF file
    try:
        turned = image.getexif().get(ORIENTATION, 1) != 1
    except Exception:  # PIL's errors for damaged EXIF are of many types
        return image
    return ImageOps.exif_transpose(image) if turned else image


def _on_white(image: Any) -> Any:
    """Draw a partly transparent image on a white background."""
    from PIL import Image

    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


def as_pixels(images: Any, count: int) -> Any:
    """Convert images to [n, h, w] or [n, h, w, c]: uint8, uint16 or float32. Images of different sizes stay a list.

    Raises ValueError unless there are `count` images, of a valid shape, with whole numbers from 0 to 65535 or floats from 0
    to 1.
    """
    if len(images) != count:
        raise ValueError(f"has {len(images)} images and {count} labels")
    if isinstance(images, list) and len({np.shape(image) for image in images}) > 1:
        return images_of(images)
    array = np.asarray(images)
    if array.ndim == 4 and array.shape[-1] == 1:
        array = array[..., 0]
    if not (array.ndim == 3 or (array.ndim == 4 and array.shape[-1] <= MOST_CHANNELS)) or 0 in array.shape:
        raise ValueError(f"has images of shape {list(array.shape)}, takes [n, h, w] or [n, h, w, c] with 1 to "
                         f"{MOST_CHANNELS} channels")  # fmt: skip
    return _levels(array)


def _levels(array: np.ndarray) -> Pixels:
    """Return whole numbers as uint8 or uint16, floats as float32."""
    if array.dtype in (np.uint8, np.uint16):
        return array
    if array.dtype == bool:
        return array.astype(np.uint8) * np.uint8(255)
    if not np.issubdtype(array.dtype, np.number) or np.issubdtype(array.dtype, np.complexfloating):
        raise ValueError(f"has images of the type {array.dtype}, takes uint8 or floats")
    floats, low, high = np.issubdtype(array.dtype, np.floating), array.min(), array.max()
    if not (low >= 0 and high <= (1 if floats else 65_535)):  # NaN, too
        takes = "from 0 to 1" if floats else "from 0 to 65535"
        raise ValueError(f"has {array.dtype} images with values from {low:g} to {high:g}, takes values {takes}")
    return array.astype(np.float32 if floats else np.uint8 if high <= 255 else np.uint16)


def numbered(parts: Mapping[str, Labelled], certain: bool = False) -> tuple[dict[str, Labels], int, tuple[str, ...]]:
    """Return class numbers from 0 for each part (such as train), the number of classes, and their names (empty: none).

    Text labels, and parts with different names, are numbered by the names of all parts in the order of `in_order`. Numbers
    with gaps from 0 are names, too, unless it is `certain` that they are class numbers. Raises
    ValueError for a label that is not a class number or has no name, and for names in only some parts.
    """
    labels, own = {}, {}
    for part, images in parts.items():
        labels[part], own[part] = _numbered(images, certain)
    named = {part: bool(names) for part, names in own.items()}
    if len(set(named.values())) > 1:
        fault = ", ".join(f"{'names' if is_named else 'numbers'} in {part}" for part, is_named in named.items())
        raise ValueError(f"has classes that are {fault}; use names in all parts, or numbers in all")
    if not any(named.values()):
        values = np.unique(np.concatenate(list(labels.values())))
        if certain or len(values) > values[-1]:
            return labels, int(values[-1]) + 1, ()
        return {part: np.searchsorted(values, array) for part, array in labels.items()}, len(values), tuple(map(str, values))
    if len(set(own.values())) == 1:
        names = next(iter(own.values()))
        return labels, len(names), names
    names = in_order({name for names in own.values() for name in names})
    number_of = {name: number for number, name in enumerate(names)}
    moved = {part: np.asarray([number_of[name] for name in own[part]], np.int64)[array] for part, array in labels.items()}
    return moved, len(names), names


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Sort names of classes: by value if all are non-negative whole numbers (2 before 10), else as texts."""
    ordered = sorted(set(names))
    if all(name.isascii() and name.isdigit() for name in ordered):
        ordered.sort(key=lambda name: (len(name.lstrip("0")), name.lstrip("0")))
    return tuple(ordered)


def _numbered(named: Labelled, certain: bool) -> tuple[Labels, tuple[str, ...]]:
    """Return a part's class numbers and its names for them."""
    array = _of_one_kind(_flat(np.asarray(named.targets)))
    if not named.names and not certain:
        _check_classes(array)
    if array.dtype.kind in "US":
        texts, numbers = np.unique(array.astype(str), return_inverse=True)
        names = in_order(map(str, texts))
        number_of = {name: number for number, name in enumerate(names)}
        return np.asarray([number_of[str(text)] for text in texts], np.int64)[numbers], names
    class_numbers = _whole(array)
    low, high, most = int(array.min()), int(array.max()), (len(named.names) or MOST_CLASSES) - 1
    if low < 0 or high > most:
        raise ValueError(f"has labels from {low} to {high}, takes class numbers from 0 to {most}")
    return class_numbers, named.names


def _of_one_kind(array: np.ndarray) -> np.ndarray:
    """Convert an array of Python objects to texts or whole numbers. Raises ValueError for mixed or other types."""
    if array.dtype != object:
        return array
    kinds = {type(item).__name__ for item in array}
    if all(isinstance(item, str) for item in array):
        return array.astype(str)
    if all(isinstance(item, int | np.integer) for item in array):
        return array.astype(np.int64)
    raise ValueError(f"has labels of the types {', '.join(sorted(kinds))}; takes only texts, or only whole numbers")


def _check_classes(array: np.ndarray) -> None:
    """Raise ValueError if nearly every image has its own label, as with measurements or file names."""
    values = np.unique(array)
    are_numbers = array.dtype.kind in "iuf" and len(values) and values[0] >= 0
    classes = int(values[-1]) + 1 if are_numbers and values[-1] < MOST_CLASSES else len(values)
    if len(values) >= MANY and len(array) < MIN_PER_CLASS * classes:
        measured = "?task=regression behind the path for measurements, " if array.dtype.kind in "iuf" else ""
        other = "" if measured else ", or choose another target"
        raise ValueError(f"has {len(values)} different labels for {len(array)} examples, nearly one per example. Write "
                         f"{measured}?task=class for classes{other}.")  # fmt: skip


def _flat(array: np.ndarray) -> np.ndarray:
    flat = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if flat.ndim != 1 or len(flat) == 0:
        raise ValueError(f"has labels of shape {list(array.shape)}, takes one label per image")
    return flat


def _whole(array: np.ndarray) -> Labels:
    numbers = array.dtype.kind in "iub" or (array.dtype.kind == "f" and bool(np.equal(np.mod(array, 1), 0).all()))
    if not numbers:
        raise ValueError(f"has labels of the type {array.dtype} that are not whole numbers or names")
    return array.astype(np.int64)
