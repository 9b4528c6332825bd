"""Data sets written by Hugging Face's save_to_disk. This module picks their columns of images and labels."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.clients.data.arrays import Labelled, image_of, numbered
from fedloom.clients.data.contents import of_arrays
from fedloom.clients.data.form import IMAGE
from fedloom.clients.data.found import Contents, Select, fitting, legible, query_of, unquoted, wrong
from fedloom.clients.data.sources import OFFICIAL, WHOLE, Pixels
from fedloom.conf.errors import plain
from fedloom.conf.formatting import count

NAMES = {"image": ("image", "images", "img", "x"), "label": ("label", "labels", "y", "target")}  # lower-case


def read_dataset(path: Path, domain: str) -> Contents:
    """Read dataset:PATH. Raises UserError if it cannot be read, or if its columns are ambiguous."""
    from datasets import ClassLabel, DatasetDict, load_from_disk

    if not path.is_dir():
        raise wrong(domain, "is not a folder. Name a folder that save_to_disk has written.")
    loaded: Any = load_from_disk(str(path))
    splits = {str(name): rows for name, rows in loaded.items()} if isinstance(loaded, DatasetDict) else {WHOLE[0]: loaded}
    if len(splits) > 1 and not set(OFFICIAL) <= splits.keys():
        raise wrong(domain, f"has the splits {', '.join(splits)}; takes train and test, or a single split")
    parts = {part: splits[part] for part in OFFICIAL} if len(splits) > 1 else {WHOLE[0]: next(iter(splits.values()))}
    columns = {use: _column(use, parts, domain) for use in NAMES}
    image, label = columns["image"], columns["label"]

    def named(rows: Any) -> Labelled:
        kind = rows.features[label]
        return Labelled(None, np.asarray(rows[label][:]), tuple(kind.names) if isinstance(kind, ClassLabel) else ())

    if not _are_images(parts, image) or query_of(domain).get("inputs", IMAGE) != IMAGE:
        return of_arrays({part: _numeric(named(rows), rows, image, domain) for part, rows in parts.items()}, domain)
    with fitting(domain):
        certain = bool(query_of(domain).get("task"))
        labels, classes, names = numbered({part: named(rows) for part, rows in parts.items()}, certain)

    def reader(part: str) -> Select:
        rows = parts[part].select_columns([image])

        def decoded(row: int) -> Pixels:
            with legible(domain, f"{path}, row {row} of {part},"):
                return image_of(rows[row][image])

        return lambda index: (decoded(int(row)) for row in index)

    unread = [name for name in splits if name not in OFFICIAL] if len(splits) > 1 else []
    left = tuple(f"the split '{plain(name)}' of {count(len(splits[name]), 'row')}" for name in unread)
    return Contents(labels, {part: reader(part) for part in parts}, classes, names, left_out=left)


def _are_images(parts: Mapping[str, Any], column: str) -> bool:
    """Return whether a column has images: of Hugging Face's kind Image, or arrays of two or three dimensions."""
    kind = next(iter(parts.values())).features[column]
    return bool(_typed_images({column: kind})) or np.ndim(next(iter(parts.values()))[0][column]) != 1


def _numeric(named: Labelled, rows: Any, column: str, domain: str) -> Labelled:
    """Return the targets with the numbers of a column of lists, all of one length."""
    query = query_of(domain)
    inputs = rows.select_columns([column]).with_format("numpy")[column][:]
    return replace(named, inputs=np.asarray(inputs), kind=query.get("inputs", ""), task=query.get("task", ""))


def _column(use: str, parts: Mapping[str, Any], domain: str) -> str:
    """Return the column of images or labels: the one in the domain's query, else the only one that fits."""
    features = next(iter(parts.values())).features
    if (given := query_of(domain).get(use)) is not None:
        asked = unquoted(given)
        if missing := [part for part, rows in parts.items() if asked not in rows.features]:
            raise wrong(domain, f"has no column '{asked}' in {missing[0]}; has {', '.join(features)}")
        return asked
    fit = {name: kind for name, kind in features.items() if (_may_be_images if use == "image" else _may_be_labels)(kind)}
    named = [name for name in fit if name.lower() in NAMES[use]]
    candidates = named or (_typed_images(fit) if use == "image" else _typed_labels(fit, parts))
    if len(candidates) == 1:
        return candidates[0]
    choose = f"Write ?{use}=COLUMN behind the path."
    if candidates:
        raise wrong(domain, f"has several columns that may be the {use}s: {', '.join(candidates)}. {choose}")
    kinds = "one column of images and one of class labels"
    raise wrong(domain, f"has the columns {', '.join(features)}; takes {kinds}. {choose}")


def _typed_images(fit: Mapping[str, Any]) -> list[str]:
    from datasets import Array2D, Array3D, Image

    return [name for name, kind in fit.items() if isinstance(kind, Image | Array2D | Array3D)]


def _typed_labels(fit: Mapping[str, Any], parts: Mapping[str, Any]) -> list[str]:
    """Return columns of class labels. If there are any, add columns of whole numbers that repeat often enough."""
    from datasets import ClassLabel

    typed = [name for name, kind in fit.items() if isinstance(kind, ClassLabel)]
    rows = next(iter(parts.values()))
    numeric = [name for name, kind in fit.items() if name not in typed and str(kind.dtype).startswith(("int", "uint"))]
    repeating = [name for name in numeric if len(np.unique(np.asarray(rows[name][:], float))) * 2 <= len(rows)]
    return [*typed, *repeating] if typed else []


def _may_be_labels(kind: Any) -> bool:
    from datasets import ClassLabel, Value

    return isinstance(kind, ClassLabel) or (isinstance(kind, Value) and "binary" not in kind.dtype)


def _may_be_images(kind: Any) -> bool:
    """Return whether a column may be images: not single numbers, texts or class labels."""
    from datasets import ClassLabel, Value

    return not isinstance(kind, ClassLabel | Value)
