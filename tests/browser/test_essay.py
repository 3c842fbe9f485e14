"""The essay as it is committed, in Chromium: every scene answers the mouse, a finger and the keys; nothing is loaded."""

import time
from functools import partial
from pathlib import Path

import pytest
from by_hand import drawn

ESSAY = Path(__file__).parents[2] / "docs" / "essay.html"
SCENES = ["draw", "cloud", "alarm", "committees", "wider", "cheap", "baselines"]
SIGHT = """figure => [...figure.querySelectorAll('svg, .wall')].map(each => each.innerHTML).join()"""
UNNAMED = """() => [...document.querySelectorAll('svg, canvas, img, input, select, button')].filter(each =>
  !(each.getAttribute('aria-label') || each.labels?.[0]?.textContent || each.alt || each.title || each.textContent))"""


@pytest.fixture
def essay(browser):
    """Open the essay; a request, or a message in the console, fails the test."""
    pages, said = [], []

    def open_(width: int, **how):
        page = browser.new_page(viewport={"width": width, "height": 850}, **how)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url))
        page.goto(ESSAY.as_uri())
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.close()
    local = ESSAY.as_uri(), "data:"
    assert [each for each in said if not each.startswith(local)] == []


def sight(figure) -> str:
    drawn(figure)
    return figure.evaluate(SIGHT)


def inside(box, x, y):
    return box["x"] + x * box["width"], box["y"] + y * box["height"]


@pytest.mark.parametrize(("width", "touch"), [(1400, False), (400, True)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_scene_answers(essay, width, touch, scheme):
    page = essay(width, has_touch=touch, color_scheme=scheme)
    page.locator("body[data-ready]").wait_for(state="attached")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert (
        page.evaluate(f"({UNNAMED})().map(each => each.outerHTML.slice(0, 99))") == []
    )

    def point(target, x=0.5, y=0.5):
        target.scroll_into_view_if_needed()
        at = inside(target.bounding_box(), x, y)
        (page.touchscreen.tap if touch else page.mouse.click)(*at)

    for name in SCENES:
        figure = page.locator(f"#{name} .figure")
        before = sight(figure)
        slider, radio = (
            figure.locator("[type=range]:visible"),
            figure.get_by_role("radio"),
        )
        if name == "draw":
            page.get_by_role("button", name="clear").click()
            point(figure.locator("canvas"), 0.3, 0.4)
        elif name == "cloud":
            point(figure.get_by_role("button", name="all hesitate"))
        elif slider.count():
            point(slider.first, 0.9)
        else:
            point(
                radio.nth(2) if radio.count() else figure.get_by_role("checkbox").first
            )
        after = sight(figure)
        assert after != before, f"{name} does not answer the pointer"
        if name == "draw":
            canvas = figure.locator("canvas")
            for key in ("ArrowRight", "ArrowDown", " "):
                canvas.press(key)
        elif name == "cloud":
            figure.locator(".member").first.press("ArrowUp")
        elif slider.count():
            slider.first.press("ArrowLeft")
        elif radio.count():
            radio.nth(2).press("ArrowRight")
        else:
            figure.get_by_role("checkbox").nth(1).press(" ")
        assert sight(figure) != after, f"{name} does not answer the keys"


def test_the_first_scene_is_drawn_in_before_any_paragraph_and_soon(essay):
    page = essay(400)
    started = time.perf_counter()
    page.reload()
    canvas = page.locator("#draw canvas")
    canvas.wait_for()
    before = page.locator("#draw .said").inner_text()
    page.get_by_role("button", name="a letter").click()
    drawn(canvas)
    assert page.locator("#draw .said").inner_text() != before
    assert time.perf_counter() - started < 2 * float(page.evaluate(SLOW))
    place = canvas.bounding_box()
    assert place["y"] + place["height"] < 850
    first = page.locator("main p:not(.do, .said, .seen)").first
    assert first.bounding_box()["y"] > place["y"]


# How many times slower than an idle core this one is at the moment; at least 1.
SLOW = """() => {
  const start = performance.now();
  for (let i = 0, x = 0; i < 5e7; i++) x += i % 7;
  return Math.max(1, (performance.now() - start) / 60);
}"""


def test_a_finger_drags_a_point_and_beside_the_points_scrolls_the_page(essay):
    page = essay(400, has_touch=True)
    page.locator("body[data-ready]").wait_for(state="attached")
    stage, members = page.locator("#cloud .stage svg"), page.locator("#cloud .member")
    stage.scroll_into_view_if_needed()
    touch = partial(page.context.new_cdp_session(page).send, "Input.dispatchTouchEvent")

    def swipe(x, y) -> float:
        """Move a finger up by 200 pixels; return by how much the page scrolled."""
        before = page.evaluate("scrollY")
        for step in range(11):
            at = [{"x": x, "y": y - 20 * step}]
            touch({"type": "touchMove" if step else "touchStart", "touchPoints": at})
            drawn(stage)
        touch({"type": "touchEnd", "touchPoints": []})
        page.wait_for_timeout(300)
        return page.evaluate("scrollY") - before

    first = members.last.get_attribute("aria-label")
    assert swipe(*inside(stage.bounding_box(), 0.5, 0.3)) > 100
    assert members.last.get_attribute("aria-label") == first
    assert swipe(*inside(members.last.locator(".dot").bounding_box(), 0.5, 0.5)) == 0
    assert members.last.get_attribute("aria-label") != first
