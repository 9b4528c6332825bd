"""TIFF files that Pillow does not read whole: several channels other than colours, and channels of 16 bits or floats."""

from pathlib import Path
from typing import Any

import numpy as np

from fedloom.conf.errors import UserError

SUFFIXES = (".tif", ".tiff")
RGB = 2  # of the tag Photometric; 0 and 1 are grey
EXTRA_IS_DATA = 0  # of the tag ExtraSamples: neither kind of transparency
SMALL_OR_MASK = 5  # bits of the tag NewSubfileType: pages that come with an image


def read_channels(file: Path) -> np.ndarray | None:
    """Return the channels of a TIFF file, [h, w] or [h, w, c]; None for a file that Pillow reads: 8 bits, or 16 and grey.

    Raises tifffile's errors, or UserError for a file with several pages, or with floats outside 0 to 1.
    """
    if file.suffix.lower() not in SUFFIXES:
        return None
    from tifffile import TiffFile

    with TiffFile(file) as tiff:
        pages: list[Any] = list(tiff.pages)
        page = pages[0]
        if (images := sum(not each.subfiletype & SMALL_OR_MASK for each in pages)) > 1:
            raise UserError(f"{file} has {images} pages, takes one; save one page per file, or an array of all as npz:PATH")
        if not _is_data(page):
            return None
        array = page.asarray()
    if array.dtype.kind == "f" and not (array.min() >= 0 and array.max() <= 1):
        raise UserError(f"{file} has floats from {array.min():g} to {array.max():g}, takes 0 to 1; divide all images by one "
                        "number, the highest value")  # fmt: skip
    return np.moveaxis(array, 0, -1) if page.planarconfig == 2 and array.ndim == 3 else array


def _is_data(page: Any) -> bool:
    """Return whether a page has floats, several channels of over 8 bits, or channels other than colours and transparency."""
    if page.samplesperpixel == 1:
        return page.dtype is not None and page.dtype.kind == "f"
    extra = tuple(map(int, page.extrasamples))
    transparent = len(extra) == 1 and extra[0] != EXTRA_IS_DATA
    several = page.samplesperpixel != 3 and int(page.photometric) <= RGB and not transparent
    return bool(several or page.bitspersample > 8)
