"""A report in a real browser: Chromium of the system, with Playwright."""

from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.sims.report.page import write_page
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
