"""Explorers in JupyterLab in a real browser: keys and mouse change the picture, and nothing goes wrong.

One made-up page has an explorer of every kind; a page of the suite shows that real ones do the same. That every
control of every page's own explorer can be moved is tested without a browser, in tests/notebooks/test_notebooks.py.
"""

from pathlib import Path

import lab
import made_up
import pytest

from uqlab import widgets
from uqlab.runs import parameters

KINDS = [make.__name__ for make in made_up.EXPLORERS]
PAGES = {  # prefix of a page -> changes of its `tiny` parameters: here nobody reads its numbers
    "01": {"epochs": 30},
}


def test_the_made_up_page_has_every_kind():
    assert {*KINDS, *(make.__name__ for make in made_up.HANDS)} == {
        *widgets.__all__
    } - {"Explorer", "Hand"}


def moves_and_resets(page: lab.Lab, explorer) -> None:
    """Every control is moved once, by keys, menu or button, a slider by the mouse too; `reset` restores the picture."""
    assert explorer.count() == 1
    seen = explorer.locator(".uqlab-seen")
    first, said = page.picture(explorer), seen.inner_text()
    assert len(said) > 20

    moved = 0
    for control in explorer.locator(":scope > :not(.uqlab-frame)").all():
        if (handle := control.locator(".noUi-handle")).count():
            handle.focus()
            value, high = (
                float(handle.get_attribute(f"aria-value{end}"))
                for end in ("now", "max")
            )
            page.move(
                lambda up=value < high: page.page.keyboard.press(
                    "ArrowRight" if up else "ArrowLeft"
                ),
                explorer,
            )
        elif (select := control.locator("select")).count():
            options = select.locator("option").count()
            if options == 1:
                continue
            at = (select.evaluate("e => e.selectedIndex") + 1) % options
            page.move(lambda s=select, at=at: s.select_option(index=at), explorer)
        elif (buttons := control.locator(".widget-toggle-button")).count():
            active = control.locator(
                ".widget-toggle-button.mod-active"
            ).first.inner_text()
            page.move(
                lambda b=buttons, a=active: b.filter(has_not_text=a).first.click(),
                explorer,
            )
        else:
            continue
        moved += 1
        assert "could not be drawn" not in seen.inner_text()
    assert moved
    assert page.picture(explorer) != first

    if (handle := explorer.locator(".noUi-handle").first).count():
        page.move(lambda: page.drag_to_an_end(handle), explorer)
        page.page.wait_for_timeout(
            500
        )  # the slider follows the hand: the last picture comes after the first
    button = explorer.get_by_role("button", name="reset")
    if page.picture(explorer) != first:  # a control with two places may be back already
        page.move(button.click, explorer)
    else:
        button.click()
    assert page.picture(explorer) == first
    assert seen.inner_text() == said
    assert page.jumped() == 0


def fits(page: lab.Lab, patterns: dict[str, str], screenshots: Path | None) -> None:
    """In both themes and two widths nothing is cut off; patterns: name of the screenshot -> source of the cell."""
    page.page.evaluate("jupyterapp.shell.collapseLeft()")
    ends = "(box, what) => [...box.querySelectorAll(what)].map(each => each.getBoundingClientRect().right)"
    for theme in lab.THEMES:
        page.theme(theme)
        for width in (1400, 400):
            page.page.set_viewport_size({"width": width, "height": 900})
            for name, pattern in patterns.items():
                explorer = page.show(pattern, ":is(.uqlab-explorer, .uqlab-hand)").first
                explorer.scroll_into_view_if_needed()
                right = max(
                    explorer.evaluate(
                        ends, ".uqlab-frame, svg, canvas, button, select, input, p"
                    )
                )
                assert right <= width, f"{name} is cut off"
                if screenshots:
                    page.page.screenshot(
                        path=screenshots / f"{name}_{theme}_{width}.png"
                    )


@pytest.mark.parametrize("kind", KINDS)
def test_explorer_answers_keys_mouse_and_reset(kind, made_up_page):
    moves_and_resets(made_up_page, made_up_page.show_explorer(f"made_up.{kind}"))
    assert made_up_page.errors == []


def test_explorers_fit_in_both_themes_and_widths(made_up_page, screenshots):
    hands = [make.__name__ for make in made_up.HANDS]
    fits(
        made_up_page,
        {kind: f"made_up.{kind}" for kind in (*KINDS, *hands)},
        screenshots,
    )
    assert made_up_page.errors == []


@pytest.mark.parametrize("prefix", PAGES)
def test_pages_in_the_browser(prefix, opened, folder, screenshots):
    path = parameters.find(prefix)
    page = opened(lab.small_copy(path, folder, **PAGES[prefix]))
    assert page.page.locator(".uqlab-explorer").count() <= 1
    moves_and_resets(page, page.show_explorer())
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
        assert index.locator("table").count() >= 3
        index.get_by_role(
            "link", name="00 What is it that we do not know?"
        ).first.click()
        page.page.locator(".jp-NotebookPanel .jp-RenderedMarkdown h1").first.wait_for()
        page.close()
