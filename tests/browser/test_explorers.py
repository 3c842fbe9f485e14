"""Every explorer in JupyterLab in a real browser: keys and mouse change the picture, and nothing goes wrong."""

import lab
import pytest

from uqlab.runs import parameters

PAGES = {path.stem: path for path in parameters.all_notebooks() if "widgets." in path.read_text()}
PICTURE = """async () => {
  const bytes = await (await fetch(document.querySelector('.uqlab-picture').src)).arrayBuffer();
  const hash = new Uint8Array(await crypto.subtle.digest('SHA-256', bytes));
  return Array.from(hash, byte => byte.toString(16).padStart(2, '0')).join('');
}"""


def test_every_page_has_an_explorer():
    assert list(PAGES) == [path.stem for path in parameters.all_notebooks()]


@pytest.mark.parametrize("name", PAGES)
def test_explorer_answers_keys_mouse_and_reset(name, pages, folder, screenshots):
    page = pages.get(PAGES[name])
    assert page.finish() == []
    lab.DONE[name] = folder / "results" / name
    page.show_explorer()
    explorer = page.page.locator(".uqlab-explorer")
    assert explorer.count() == 1
    seen = explorer.locator(".uqlab-seen")
    first, said = page.page.evaluate(PICTURE), seen.inner_text()
    assert len(said) > 20

    moved = 0
    for control in explorer.locator(":scope > *").all():
        if (handle := control.locator(".noUi-handle")).count():
            handle.focus()
            value, high = (float(handle.get_attribute(f"aria-value{end}")) for end in ("now", "max"))
            page.move(lambda up=value < high: page.page.keyboard.press("ArrowRight" if up else "ArrowLeft"))
        elif (select := control.locator("select")).count():
            options = select.locator("option").count()
            if options == 1:
                continue
            page.move(lambda s=select, n=options: s.select_option(index=(s.evaluate("e => e.selectedIndex") + 1) % n))
        elif (buttons := control.locator(".widget-toggle-button")).count():
            active = control.locator(".widget-toggle-button.mod-active").first.inner_text()
            page.move(lambda b=buttons, a=active: b.filter(has_not_text=a).first.click())
        else:
            continue
        moved += 1
        assert "could not be drawn" not in seen.inner_text()
    assert moved
    assert page.page.evaluate(PICTURE) != first

    if (handle := explorer.locator(".noUi-handle").first).count():
        page.move(lambda: page.drag_to_an_end(handle))
    if page.page.evaluate(PICTURE) != first:  # a control with two places may be back already
        page.move(lambda: explorer.get_by_role("button", name="reset").click())
    else:
        explorer.get_by_role("button", name="reset").click()
    assert page.page.evaluate(PICTURE) == first
    assert seen.inner_text() == said
    assert page.jumped() == 0

    for theme in lab.THEMES:
        page.theme(theme)
        for width in (1280, 800):
            page.page.set_viewport_size({"width": width, "height": 900})
            explorer.scroll_into_view_if_needed()
            box = explorer.locator(".uqlab-picture").bounding_box()
            assert box["x"] + box["width"] <= width, "the picture is cut off"
            page.page.screenshot(path=screenshots / f"{name}_{theme}_{width}.png")
    assert page.errors == []
    page.shut_kernel()
    page.page.close()


def test_lab_opens_the_index_and_its_links_open_notebooks(browser, tmp_path):
    with lab.server(tmp_path) as address:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(180_000)
        page.goto(address.format(path=""))
        index = page.locator(".jp-RenderedMarkdown")
        index.locator("h1").wait_for()
        assert index.locator("table").count() >= 3
        index.get_by_role("link", name="00 What is it that we do not know?").first.click()
        page.locator(".jp-NotebookPanel .jp-RenderedMarkdown h1").first.wait_for()
        page.close()
