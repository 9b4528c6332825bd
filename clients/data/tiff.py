"""TIFF files that Pillow does not read whole: several channels other than colours, and channels of 16 bits or floats."""

from pathlib import Path
from typing import Any

import numpy as np

SUFFIXES = (".tif", ".tiff")
EXTRA_IS_DATA = 0  # of the tag ExtraSamples: neither kind of transparency


def read_channels(file: Path) -> np.ndarray | None:
    """Return the channels of a TIFF file, [h, w] or [h, w, c]; None for grey or RGB of 8 bits, which Pillow reads.

    Raises tifffile's errors, or ValueError for a file with several pages.
    """
    if file.suffix.lower() not in SUFFIXES:
        return None
    from tifffile import TiffFile

    with TiffFile(file) as tiff:
        page: Any = tiff.pages[0]
        if not _is_data(page):
            return None
        if len(tiff.pages) > 1:
            raise ValueError(f"it has {len(tiff.pages)} pages; save one image per file")
        array = page.asarray()
    return np.moveaxis(array, 0, -1) if page.planarconfig == 2 and array.ndim == 3 else array


def _is_data(page: Any) -> bool:
    """Return whether a page has several channels that are neither colours nor transparency, or colours of over 8 bits."""
    extra = tuple(page.extrasamples)
    if page.samplesperpixel == 1:
        return page.dtype is not None and page.dtype.kind == "f"
    if extra and any(int(kind) != EXTRA_IS_DATA for kind in extra):
        return False
    several = page.samplesperpixel != 3 and int(page.photometric) in (0, 1, 2)
    return bool(several or page.bitspersample > 8)
