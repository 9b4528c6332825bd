"""Small files in the formats of the shipped data sets, for tests that need other domains than the embedded ones."""

import gzip
import io
from pathlib import Path

import numpy as np
from PIL import Image


def write_idx(path: Path, array: np.ndarray, pack: bool = False) -> None:
    """An array of bytes in MNIST's format; `pack`: compressed, with the ending `.gz`."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path = path.with_name(f"{path.name}.gz") if pack else path
    path.write_bytes(gzip.compress(header + array.tobytes()) if pack else header + array.tobytes())


def write_mnist_like(folder: Path, name: str, pack: bool = False) -> Path:
    """Torchvision's raw files of `name` (KMNIST, FashionMNIST, ...): 60 and 20 images, each of one grey level."""
    raw = folder / name / "raw"
    raw.mkdir(parents=True)
    for part, count in {"train": 60, "t10k": 20}.items():
        y = (np.arange(count) % 10).astype(np.uint8)
        write_idx(raw / f"{part}-labels-idx1-ubyte", y, pack)
        write_idx(raw / f"{part}-images-idx3-ubyte", np.repeat(y, 784).reshape(-1, 28, 28), pack)
    return folder


def write_sheets(folder: Path, name: str, classes: int) -> Path:
    """`name`.npz (cifar10, cifar100) with one grey sheet of 1000 tiles for each part."""
    sheet = io.BytesIO()
    Image.new("RGB", (25 * 32, 40 * 32), (128, 128, 128)).save(sheet, "JPEG")
    jpeg, labels = np.frombuffer(sheet.getvalue(), np.uint8), (np.arange(1000) % classes).astype(np.uint8)
    np.savez(folder / f"{name}.npz", train_00=jpeg, test_00=jpeg, y_train=labels, y_test=labels)
    return folder
