"""The desk in a real browser: Chromium of the system, with Playwright; axe-core looks for what keeps people out."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

from fedloom.server.ledger import Ledger
from tests.sims.commands import ONE, Command
from tests.sims.desks import Folder, folder_with, free_port, served, until

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs pip install axe-playwright-python")

pytestmark = [pytest.mark.usefixtures("blank_pictures"), pytest.mark.slow]
PAGES = ["/", "/requests", "/compare?one=digits&other=digits", "/audit", "/nowhere", "/runs/digits",
         f"/runs/digits/sites/{ONE}",
         "/runs/digits/requests", "/runs/digits/requests/r1", "/runs/digits/certificates", "/runs/digits/certificates/r1",
         "/runs/digits/events", "/runs/digits/ask"]  # fmt: skip
WHOLE = ["/audit", "/runs/digits", "/runs/digits/events", "/runs/digits/requests/r1"]  # all columns on a telephone
CUT = """[...document.querySelectorAll("main *")].filter(one => one.clientWidth > 1 && one.scrollWidth > one.clientWidth + 1
    && getComputedStyle(one).overflowX !== "visible").map(one => one.className)"""
WIDTHS = (360, 800, 1600)


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Folder:
    return folder_with(finished_run, tmp_path / "runs")


@pytest.fixture
def desk(folder: Folder) -> Iterator[str]:
    port = free_port()
    with served(folder, port):
        yield f"http://localhost:{port}"


def logged_in(context: "BrowserContext", desk: str, secret: str) -> "Page":
    """A page of someone who has logged in."""
    page = context.new_page()
    page.goto(f"{desk}/runs/digits")
    page.get_by_label("Token").fill(secret)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{desk}/runs/digits")  # where they wanted to go, loaded
    return page


def test_someone_asks_to_forget_a_site_and_cancels_without_javascript(chromium: "Browser", folder: Folder, desk: str):
    page = logged_in(chromium.new_context(java_script_enabled=False), desk, folder.secrets["requester"])
    page.get_by_role("link", name="Ask to forget a site").click()
    page.get_by_role("checkbox", name=ONE).check()
    page.wait_for_load_state()
    assert page.get_by_role("checkbox", name="site-").count() == 1  # the token's site alone
    page.get_by_label("Reason").fill("consent withdrawn")
    page.get_by_role("button", name="Review").click()
    page.get_by_role("heading", name=f"Forget {ONE}?").wait_for()
    page.get_by_role("button", name="Send the request").click()
    page.get_by_text("received", exact=True).first.wait_for()
    with Ledger.open(folder.run, server=False) as ledger:
        assert [(one.sites, one.by, one.reason) for one in ledger.waiting()] == [((ONE,), "requester", "consent withdrawn")]
    page.get_by_role("button", name="Cancel the request").click()
    page.get_by_text("cancelled by requester").wait_for()
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("Token").wait_for()


def test_a_page_follows_its_run(chromium: "Browser", folder: Folder, desk: str):
    page = logged_in(chromium.new_context(), desk, folder.secrets["viewer"])
    fact = page.locator("dt", has_text="Open requests").locator("xpath=following-sibling::dd")
    assert fact.inner_text() == "0"
    with Ledger.open(folder.run, server=False) as ledger:
        ledger.receive("r1", "unlearn", [ONE], "", {})
    until(lambda: page.wait_for_timeout(100) or fact.inner_text() == "1", "the page shows the request", 30)


def test_all_works_by_keyboard(chromium: "Browser", folder: Folder, desk: str):
    page = logged_in(chromium.new_context(), desk, folder.secrets["operator"])
    page.goto(f"{desk}/runs/digits/ask")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")  # from the content on
    inside = "document.querySelector('main').contains(document.activeElement)"
    assert page.evaluate(inside)
    for _ in range(20):
        if page.evaluate("document.activeElement.name") == "site":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.locator("input[name=site]:checked").count() == 1
    page.get_by_label("Reason").focus()
    page.keyboard.type("by keyboard")
    while page.evaluate("document.activeElement.textContent") != "Review":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Send the request").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_readable_for_all(
    chromium: "Browser", fedloom: Command, folder: Folder, desk: str, scheme: Literal["light", "dark"]
):
    assert fedloom("unlearn", folder.run, ONE, "--request-id", "r1", "--reason", "<b>x</b>" * 20, "--quiet").code == 0
    context, said = chromium.new_context(color_scheme=scheme), list[str]()
    page = logged_in(context, desk, folder.secrets["operator"])
    page.on("console", lambda message: said.append(f"{page.url}: {message.text}"))
    for path in PAGES:
        page.goto(f"{desk}{path}")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is wider than {width}"
        page.set_viewport_size({"width": 400, "height": 900})
        if path in WHOLE:
            assert page.evaluate(CUT) == [], path
        page.set_viewport_size({"width": WIDTHS[-1], "height": 900})
        found = axe.Axe().run(page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == [], path
    assert [line for line in said if "404" not in line] == []  # the browser reports /nowhere


def test_a_script_that_gets_into_a_page_does_not_run(chromium: "Browser", folder: Folder, desk: str):
    page = logged_in(chromium.new_context(), desk, folder.secrets["operator"])
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.ran = true";
        document.body.append(script);
        document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.ran = true'>");
    }""")
    page.wait_for_timeout(300)
    assert page.evaluate("window.ran") is None
    assert page.evaluate("document.cookie") == ""
    assert page.evaluate("fetch('https://evil.example/').then(() => 'sent', () => 'blocked')") == "blocked"
