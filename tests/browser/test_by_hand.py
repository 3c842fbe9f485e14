"""Explorers that answer the hand in JupyterLab with a kernel, and in an exported page."""

import json
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import made_up
import pytest
from by_hand import bars, decomposed, drag, drawn
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html
from nbformat.v4 import new_code_cell, new_notebook, new_output


# In JupyterLab --------------------------------------------------------------------------------------------------------
def test_a_dragged_cloud_is_in_the_kernel(made_up_page):
    hand = made_up_page.show(r"made_up.cloud", ".uqlab-hand")
    hand.locator(".dot").first.wait_for()
    page = made_up_page.page
    drag(hand, 2, (170, 200))
    hand.get_by_label("jackknife").check()
    page.wait_for_timeout(300)
    state = json.loads(made_up_page.ask("import json; print(json.dumps(cloud.state))"))
    assert state["jackknife"]
    shown = bars(hand)
    assert shown == pytest.approx(
        {name: decomposed(state)[name] for name in shown}, abs=1e-6
    )
    hand.locator(".member").first.focus()
    page.keyboard.press("ArrowUp")  # JupyterLab's own keys sleep
    assert bars(hand) != shown
    page.keyboard.press("c")
    assert hand.locator(".member").count() == 6
    assert made_up_page.errors == []


# Without a kernel -----------------------------------------------------------------------------------------------------
def test_an_exported_page_has_explorers_that_answer(browser, tmp_path):
    """As nbconvert makes it, read from a file while nothing can be loaded from anywhere."""
    made = {make.__name__: make() for make in made_up.HANDS}
    notebook = new_notebook()
    for name, each in made.items():
        bundle = each._repr_mimebundle_()
        shown = new_output(
            "display_data", bundle[0] if isinstance(bundle, tuple) else bundle
        )
        notebook.cells.append(new_code_cell(name, outputs=[shown]))
    (tmp_path / "page.html").write_text(HTMLExporter().from_notebook_node(notebook)[0])
    page, errors = browser.new_page(viewport={"width": 900, "height": 800}), []
    page.route(
        "**/*",
        lambda route: (
            route.continue_()
            if route.request.url.startswith("file:")
            else route.abort()
        ),
    )
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator("iframe").count() == len(made_up.HANDS)
    for at, name in enumerate(made):
        frame = page.locator("iframe").nth(at)
        inner = frame.content_frame
        inner.locator(".seen").first.wait_for(state="attached")
        drawn(inner.locator("body"))
        needed = inner.locator("body").evaluate("body => body.offsetHeight")
        least = 80 if name == "guess" else 200
        assert frame.bounding_box()["height"] >= needed > least, name
    inner = page.frame_locator("iframe[title='cloud']")
    before = inner.locator(".seen").inner_text()
    inner.locator(".member").first.press("ArrowUp")
    assert inner.locator(".seen").inner_text() != before
    frames = page.locator("iframe[title='frames']")
    assert frames.count() == len(made_up.PICTURES)
    for frame in frames.all():
        inner = frame.content_frame
        picture, said = inner.locator("img"), inner.locator(".seen")
        slider, seen = inner.locator("[type=range]").first, set()
        for key in ("Home", "End"):
            slider.press(key)
            seen.add((picture.get_attribute("src"), said.inner_text()))
            wide = "picture => picture.decode().then(() => picture.naturalWidth)"
            assert picture.evaluate(wide) > 300
        assert [len({*each}) for each in zip(*seen, strict=True)] == [2, 2]
    inner = page.frame_locator("iframe[title='guess']")
    inner.get_by_role("slider").press("End")
    inner.get_by_role("button").press("Enter")
    assert "The order stays." in inner.locator(".seen").inner_text()
    page.close()
    assert [
        error for error in errors if "require" not in error and "MathJax" not in error
    ] == []


def test_the_guide_in_the_book_has_one_that_lives(browser, tmp_path, monkeypatch):
    """As the book's source has it, made into HTML without Sphinx, which tests do not need."""
    for name in ("docutils", "latex2mathml", "latex2mathml.converter"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    book = Path(__file__).parents[2] / "book"
    conf, guide = (
        runpy.run_path(str(book / "conf.py")),
        (book / "guides" / "explorers.md").read_text(),
    )
    text, count = conf["ALIVE"].subn(conf["alive"], guide)
    assert count == 1
    (tmp_path / "guide.html").write_text(f"<!doctype html>{markdown2html(text)}")
    page, wanted = browser.new_page(viewport={"width": 900, "height": 800}), []
    page.on("request", lambda request: wanted.append(request.url))
    page.goto((tmp_path / "guide.html").as_uri())
    hand = page.frame_locator("iframe[title='cloud']").locator(".uqlab-hand")
    before = bars(hand)
    drag(hand, 0, (170, 150))
    hand.get_by_role("button", name="group 2", exact=True).click()
    hand.locator(".member").nth(1).press("2")
    after = bars(hand)
    assert abs(after["aleatoric"] - before["aleatoric"]) > 0.01
    assert after["between"] != before["between"]
    assert (
        page.locator("iframe").bounding_box()["height"]
        >= hand.bounding_box()["height"]
        > 200
    )
    page.close()
    assert [url for url in wanted if not url.startswith("file:")] == []
