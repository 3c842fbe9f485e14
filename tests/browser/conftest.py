"""One Chromium for all browser tests; skipped where there is no browser, but not under CI."""

import os

import lab
import pytest

OURS = "\nObject.assign(window, {functions});"  # makes functions of a module reachable from the test


@pytest.fixture(scope="session")
def browser():
    path = lab.chromium()
    if not path:
        reason = "no Chromium: `playwright install chromium`"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    with lab.browser(path) as browser:
        yield browser


@pytest.fixture
def alone(browser):
    """Open an explorer's own page; whatever it asks from outside is refused and fails the test."""
    pages, wanted, errors = [], [], []

    def refuse(route):
        wanted.append(route.request.url)
        route.abort()

    def open_(hand, functions: str = "{}", **how):
        page = browser.new_page(viewport={"width": 900, "height": 800}, **how)
        page.route("**/*", refuse)
        page.on("pageerror", lambda error: errors.append(str(error)))
        ours = OURS.format(functions=functions) + "\nrender({"
        page.set_content(hand.html().replace("\nrender({", ours))
        page.locator(".uqlab-hand .seen").first.wait_for(state="attached")
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.close()
    assert (wanted, errors) == ([], [])
