"""Names in scripts that the picture's font lacks: no raw warnings, and a picture all the same."""

import warnings
from pathlib import Path

import pytest
from PIL import Image

from fedloom import run
from fedloom.sims.report.canvas import name_ticks, new_figure, save
from tests.sims.test_api import TREE

NAMES = ["плёнка", "猫", "犬の写真", "한국어", "हिन्दी", "ไทย", "\U0001f984", "\U00013000", "ᚠᚢᚦ"]


@pytest.fixture(autouse=True)
def strict():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Glyph|.*missing from")
        yield


def test_a_picture_with_letters_that_no_font_has(tmp_path: Path):
    figure, axes = new_figure(4, 3)
    axes.imshow([[0.0] * len(NAMES)] * len(NAMES))
    name_ticks(axes, NAMES, NAMES)
    axes.set_title(NAMES[1])
    axes.plot([0, 1], [0, 1], label=NAMES[2])
    axes.legend()
    with Image.open(save(figure, tmp_path / "a.png")) as image:
        assert image.size[0] > 100


def test_other_warnings_are_reported(tmp_path: Path):
    figure, axes = new_figure(4, 3)
    axes.figure.canvas.mpl_connect("draw_event", lambda _: warnings.warn("something else", UserWarning, stacklevel=1))
    with pytest.warns(UserWarning, match="something else"):
        save(figure, tmp_path / "a.png")


def test_a_report_of_sites_and_domains_of_such_names_is_whole(tmp_path: Path):
    sites = [{"domain": "digits", "samples": 40, "name": "病院", "label": "手書き"},
             {"domain": "digits", "samples": 40, "name": "клиника", "label": "\U0001f984", "invert": True}]  # fmt: skip
    result = run({**TREE, "sites": sites}, f"run.root={tmp_path}", "run.name=a")
    page = result.report.read_text(encoding="utf-8")
    assert all(word in page for word in ("病院", "手書き", "клиника")) and list((tmp_path / "a" / "plots").glob("*.png"))
