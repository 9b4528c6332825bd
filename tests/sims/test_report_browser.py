"""A report in a real browser: Chromium of the system, with Playwright."""

from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.sims.report.canvas import save
from fedloom.sims.report.curves import accuracy_figure
from fedloom.sims.report.page import Picture, write_page
from fedloom.sims.report.tables import Table

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TABLE = Table("t", ["site", "accuracy"], [["b", "9.5%"], ["c", "* 10.0%"], ["a", "-"]])


def test_a_click_on_a_head_sorts_the_table(chromium: "Browser", tmp_path: Path):
    page, faults = chromium.new_page(), list[str]()
    page.on("console", lambda message: faults.append(message.text))
    page.goto(write_page(tmp_path / "page.html", "t", [("", [TABLE])], sorts=True).as_uri())

    def sites() -> list[str]:
        return page.locator("tbody td:first-child").all_inner_texts()

    assert sites() == ["b", "c", "a"]
    page.get_by_text("accuracy").click()
    assert sites() == ["a", "b", "c"]
    page.get_by_text("accuracy").click()
    assert sites() == ["c", "b", "a"] and page.locator("th[aria-sort]").inner_text() == "accuracy"
    page.get_by_text("site").press("Enter")
    assert sites() == ["a", "b", "c"]
    assert not faults, "the page's policy allows its script"


def test_without_scripts_and_in_the_dark(chromium: "Browser", tmp_path: Path):
    context = chromium.new_context(java_script_enabled=False, color_scheme="dark")
    page = context.new_page()
    page.goto(write_page(tmp_path / "page.html", "t", [("", [TABLE])], sorts=True).as_uri())
    assert page.locator("tbody td:first-child").all_inner_texts() == ["b", "c", "a"]
    with chromium.new_page(color_scheme="dark") as dark:
        dark.goto(page.url)
        colours = dark.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
        assert colours == ["rgb(230, 234, 240)", "rgb(18, 22, 29)"]
        dark.emulate_media(media="print")
        assert dark.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    context.close()


def test_a_box_hides_its_curve_without_a_script(chromium: "Browser", tmp_path: Path):
    names = ("digits", '<b id="x">', "union")
    records = [{"round": n, "accuracy": dict.fromkeys(names, n / (9 + len(names)))} for n in range(1, 4)]
    pictures = [Picture(tmp_path / f"{name}.png", "c") for name in ("one", "two")]
    for each in pictures:
        figure = accuracy_figure(records)
        assert figure is not None
        save(figure, each.path, ["svg"])
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(write_page(tmp_path / "page.html", "t", [("", pictures)]).as_uri())
    boxes, curves = page.locator("figure").first.get_by_role("checkbox"), page.locator("figure").first.locator("svg [class]")
    assert sorted(page.locator("figure").first.locator("label").all_inner_texts()) == sorted(f" {name}" for name in names)
    assert [curves.nth(n).is_visible() for n in range(curves.count())] == [True] * 6, "a line and a label each"
    boxes.nth(1).uncheck()
    assert page.locator("figure").first.locator(".curve-1").count() == 2
    assert not any(page.locator("figure").first.locator(".curve-1").nth(n).is_visible() for n in range(2))
    assert sum(curves.nth(n).is_visible() for n in range(6)) == 4
    assert page.locator("figure").last.locator(".curve-1").first.is_visible(), "another picture has boxes of its own"
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)")
    assert len(ids) == len(set(ids)) > 20 and page.locator("#x").count() == 0
    context.close()
