"""The built site in Chromium, from its folder and without network: ``make test-docs``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
PAGES = sorted(SITE.rglob("*.html"))
BROKEN = "[...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src)"
CUT = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser():
    """Chromium of this machine."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert chromium is not None, "these tests need the program chromium on the PATH: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=60_000)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page that may ask nobody; at the end nothing may have gone to the error console."""
    asked, errors = [], []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(60_000)
    page.route("**/*", lambda route: route.continue_() if route.request.url.startswith("file:") else route.abort())
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert errors == []


def test_from_a_loss_that_is_nan_to_the_layer_in_three_clicks(page):
    """From the first page: where NaN began, with the layer in what is printed; the rules; the picture of such a run."""
    page.goto((SITE / "index.html").as_uri())
    content = page.locator("article")
    content.get_by_role("row", name="My loss is NaN").get_by_role("link").click()
    expect(content.get_by_role("heading", level=1)).to_have_text("My loss is NaN")
    expect(content.locator("pre", has_text="[CRITICAL] NUMERICAL in 2")).to_be_visible()
    content.get_by_role("link", name="gain map").click()
    expect(content.get_by_role("heading", level=1)).to_have_text("Which layer is the problem?")
    expect(content.get_by_role("img").first).to_be_visible()


def test_the_site_is_built():
    """There is a page for every page of the sources."""
    docs = Path(__file__).resolve().parents[2] / "docs"
    wanted = {path.relative_to(docs).with_suffix(".html") for path in docs.rglob("*.md")}
    assert wanted <= {path.relative_to(SITE) for path in PAGES}


@pytest.mark.parametrize("width", [1280, 375])
def test_every_page_opens(page, width):
    """Its pictures are there, it asks nobody, and it is no wider than the window."""
    page.set_viewport_size({"width": width, "height": 900})
    wrong = {}
    for path in PAGES:
        page.goto(path.as_uri())
        page.wait_for_load_state("load")
        broken, cut = page.evaluate(BROKEN), page.evaluate(CUT)
        if broken or cut > 0:
            wrong[path.name] = broken, cut
    assert wrong == {}
