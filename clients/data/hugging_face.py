"""Data sets that Hugging Face's save_to_disk has written: which of their columns are images and labels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.clients.data.arrays import Named, image_of, numbered
from fedloom.clients.data.found import Contents, Select, columns_of, fitting, legible, wrong
from fedloom.clients.data.sources import OFFICIAL, WHOLE, Pixels
from fedloom.conf.errors import plain
from fedloom.conf.formatting import count

NAMES = {"image": ("image", "images", "img", "x"), "label": ("label", "labels", "y", "target")}  # in small letters


def read_dataset(path: Path, domain: str) -> Contents:
    """What is in dataset:PATH. UserError for what cannot be read, or where it is open which columns are meant."""
    from datasets import ClassLabel, DatasetDict, load_from_disk

    if not path.is_dir():
        raise wrong(domain, "is not a folder; name one that save_to_disk has written")
    loaded: Any = load_from_disk(str(path))
    splits = {str(name): rows for name, rows in loaded.items()} if isinstance(loaded, DatasetDict) else {WHOLE[0]: loaded}
    if len(splits) > 1 and not set(OFFICIAL) <= splits.keys():
        raise wrong(domain, f"has the splits {', '.join(splits)}; takes train and test, or one alone")
    parts = {part: splits[part] for part in OFFICIAL} if len(splits) > 1 else {WHOLE[0]: next(iter(splits.values()))}
    columns = {use: _column(use, parts, domain) for use in NAMES}
    image, label = columns["image"], columns["label"]

    def named(rows: Any) -> Named:
        kind = rows.features[label]
        return Named(None, np.asarray(rows[label][:]), tuple(kind.names) if isinstance(kind, ClassLabel) else ())

    with fitting(domain):
        labels, classes, names = numbered({part: named(rows) for part, rows in parts.items()})

    def reader(part: str) -> Select:
        rows = parts[part].select_columns([image])

        def decoded(place: int) -> Pixels:
            with legible(domain, f"{path}, row {place} of {part},"):
                return image_of(rows[place][image])

        return lambda index: (decoded(int(place)) for place in index)

    unread = [name for name in splits if name not in OFFICIAL] if len(splits) > 1 else []
    left = tuple(f"the split '{plain(name)}' of {count(len(splits[name]), 'row')}" for name in unread)
    return Contents(labels, {part: reader(part) for part in parts}, classes, names, left_out=left)


def _column(use: str, parts: Mapping[str, Any], domain: str) -> str:
    """The column of images, or of labels: the one that is asked for, or else the only one that can be meant."""
    features = next(iter(parts.values())).features
    if (asked := columns_of(domain).get(use)) is not None:
        if missing := [part for part, rows in parts.items() if asked not in rows.features]:
            raise wrong(domain, f"has no column '{asked}' in {missing[0]}; has {', '.join(features)}")
        return asked
    fit = {name: kind for name, kind in features.items() if (_may_be_images if use == "image" else _may_be_labels)(kind)}
    named = [name for name in fit if name.lower() in NAMES[use]]
    found = named or (_typed_images(fit) if use == "image" else _typed_labels(fit, parts))
    if len(found) == 1:
        return found[0]
    choose = f"choose with 'dataset:PATH?{use}=COLUMN'"
    if found:
        raise wrong(domain, f"has {', '.join(found)}, each of which may be the {use}s; {choose}")
    kinds = "one of images and one of class labels"
    raise wrong(domain, f"has the columns {', '.join(features)}; takes {kinds}; {choose}")


def _typed_images(fit: Mapping[str, Any]) -> list[str]:
    from datasets import Array2D, Array3D, Image

    return [name for name, kind in fit.items() if isinstance(kind, Image | Array2D | Array3D)]


def _typed_labels(fit: Mapping[str, Any], parts: Mapping[str, Any]) -> list[str]:
    """Columns of class labels; beside them whole numbers that come again and again, which may be meant as well."""
    from datasets import ClassLabel

    typed = [name for name, kind in fit.items() if isinstance(kind, ClassLabel)]
    rows = next(iter(parts.values()))
    whole = [name for name, kind in fit.items() if name not in typed and str(kind.dtype).startswith(("int", "uint"))]
    again = [name for name in whole if len(np.unique(np.asarray(rows[name][:], float))) * 2 <= len(rows)]
    return [*typed, *again] if typed else []


def _may_be_labels(kind: Any) -> bool:
    from datasets import ClassLabel, Value

    return isinstance(kind, ClassLabel) or (isinstance(kind, Value) and "binary" not in kind.dtype)


def _may_be_images(kind: Any) -> bool:
    """Images, arrays and lists of lists; no single numbers and texts."""
    from datasets import ClassLabel, Value

    return not isinstance(kind, ClassLabel | Value)
