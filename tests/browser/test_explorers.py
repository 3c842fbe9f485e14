"""Explorers in JupyterLab in a real browser: keys and mouse change what is seen, and nothing goes wrong.

One made-up page has an explorer of every kind; a page of the suite shows that real ones do the same. That every
control of every page's own explorer can be moved is tested without a browser, in tests/notebooks/test_notebooks.py.
"""

from pathlib import Path

import lab
import made_up
import pytest
from by_hand import drawn

from uqlab import widgets
from uqlab.runs import parameters

KINDS = [make.__name__ for make in (*made_up.PICTURES, made_up.spectra)]
PAGES = {  # prefix of a page -> changes of its `tiny` parameters: here nobody reads its numbers
    "01": {"epochs": 30},
}
SIGHT = "hand => [...hand.querySelectorAll('.still, .row')].map(each => each.innerHTML).join()"
CONTROLS = "select:has(option + option), [type=range]:not([max='0']), .radio"


def test_the_made_up_page_has_every_kind():
    made = {make.__name__ for make in made_up.HANDS}
    assert made == {*widgets.__all__} - {"Control", "Hand"}


def sight(explorer) -> str:
    """What is seen below the controls, once it is drawn."""
    drawn(explorer)
    return explorer.evaluate(SIGHT)


def press(control) -> None:
    """Choose another value by the keys, of a menu by choosing."""
    if control.evaluate("each => each.tagName === 'SELECT'"):
        at = control.evaluate("each => (each.selectedIndex + 1) % each.length")
        control.select_option(index=at)
    elif control.evaluate("each => each.type === 'range'"):
        full = control.evaluate("each => each.value === each.max")
        control.press("ArrowLeft" if full else "ArrowRight")
    else:
        control.locator(":checked").press("ArrowRight")


def moves_and_resets(explorer) -> None:
    """Every control is moved by keys, a slider by the mouse too; `reset` restores picture and line."""
    assert explorer.count() == 1
    seen = explorer.locator(".seen")
    first, said = sight(explorer), seen.inner_text()
    size = explorer.locator(":is(.still, .row) > :first-child").bounding_box()
    assert len(said) > 20
    assert explorer.locator(CONTROLS).count()
    for control in explorer.locator(CONTROLS).all():
        before = sight(explorer)
        press(control)
        assert sight(explorer) != before
    moved = explorer.locator(":is(.still, .row) > :first-child").bounding_box()
    assert (moved["width"], moved["height"]) == (size["width"], size["height"])

    sliders = explorer.locator("[type=range]:not([max='0'])")
    if sliders.count():
        place, before = sliders.first.bounding_box(), sight(explorer)
        full = sliders.first.evaluate("each => each.value > each.max / 2")
        at = 0.01 if full else 0.99
        explorer.page.mouse.click(
            place["x"] + at * place["width"], place["y"] + place["height"] / 2
        )
        assert sight(explorer) != before
    explorer.get_by_role("button", name="reset").click()
    assert sight(explorer) == first
    assert seen.inner_text() == said


def fits(page: lab.Lab, patterns: dict[str, str], screenshots: Path | None) -> None:
    """In both themes and two widths nothing is cut off; patterns: name of the screenshot -> source of the cell."""
    page.page.evaluate("jupyterapp.shell.collapseLeft()")
    ends = "(box, what) => [...box.querySelectorAll(what)].map(each => each.getBoundingClientRect().right)"
    for theme in lab.THEMES:
        page.theme(theme)
        for width in (1400, 400):
            page.page.set_viewport_size({"width": width, "height": 900})
            for name, pattern in patterns.items():
                explorer = page.show(pattern, ".uqlab-hand").first
                explorer.scroll_into_view_if_needed()
                right = max(
                    explorer.evaluate(
                        ends, ".still, svg, canvas, button, select, input, p"
                    )
                )
                assert right <= width, f"{name} is cut off"
                if screenshots:
                    page.page.screenshot(
                        path=screenshots / f"{name}_{theme}_{width}.png"
                    )


@pytest.mark.parametrize("kind", KINDS)
def test_explorer_answers_keys_mouse_and_reset(kind, made_up_page):
    moves_and_resets(made_up_page.show(rf"made_up\.{kind}\(", ".uqlab-hand"))
    assert made_up_page.errors == []


def test_explorers_fit_in_both_themes_and_widths(made_up_page, screenshots):
    kinds = [make.__name__ for make in made_up.HANDS]
    patterns = {kind: rf"made_up\.{kind}\(" for kind in kinds}
    fits(made_up_page, patterns, screenshots)
    assert made_up_page.errors == []


@pytest.mark.parametrize("prefix", PAGES)
def test_pages_in_the_browser(prefix, opened, folder, screenshots):
    path = parameters.find(prefix)
    page = opened(lab.small_copy(path, folder, **PAGES[prefix]))
    moves_and_resets(page.show(lab.EXPLORERS, ".uqlab-hand").last)  # below a guess
    fits(page, {path.stem: lab.EXPLORERS}, screenshots)
    assert page.errors == []
    page.close()


def test_lab_opens_the_index_and_its_links_open_notebooks(browser, tmp_path):
    with lab.server(tmp_path) as address:
        page = lab.Lab(
            browser.new_page(viewport={"width": 1280, "height": 900}), address
        )
        page.page.goto(address.format(path=""))
        index = page.page.locator(".jp-RenderedMarkdown")
        index.locator("h1").wait_for()
        assert index.locator("table").count() >= 2
        index.get_by_role(
            "link", name="00 What is it that we do not know?"
        ).first.click()
        page.page.locator(".jp-NotebookPanel .jp-RenderedMarkdown h1").first.wait_for()
        page.close()
