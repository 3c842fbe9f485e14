"""Explorers answer keys and mouse alone, in an exported page, in the book, and in JupyterLab with a kernel."""

import json
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import lab
import made_up
import nbformat
import pytest
from by_hand import bars, decomposed, drag, drawn
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html
from nbformat.v4 import new_code_cell, new_notebook, new_output

KINDS = (*made_up.PICTURES, made_up.spectra)
SIGHT = "hand => [...hand.querySelectorAll('.still, .row')].map(each => each.innerHTML).join()"
CONTROLS = "select:has(option + option), [type=range]:not([max='0']), .radio"
RIGHT = """(box, what) => Math.max(...[...box.querySelectorAll(what)].map(
  each => each.getBoundingClientRect().right))"""


def named(make):
    return make.__name__


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


@pytest.mark.parametrize("make", KINDS, ids=named)
def test_explorer_answers_keys_mouse_and_reset(make, alone):
    explorer = alone(make()).locator(".uqlab-hand")
    first, said = sight(explorer), explorer.locator(".seen").inner_text()
    for control in explorer.locator(CONTROLS).all():
        before = sight(explorer)
        press(control)
        assert sight(explorer) != before
    for slider in explorer.locator("[type=range]:not([max='0'])").all()[:1]:
        place, before = slider.bounding_box(), sight(explorer)
        full = slider.evaluate("each => each.value > each.max / 2")
        x = place["x"] + (0.01 if full else 0.99) * place["width"]
        explorer.page.mouse.click(x, place["y"] + place["height"] / 2)
        assert sight(explorer) != before
    explorer.get_by_role("button", name="reset").click()
    assert sight(explorer) == first
    assert explorer.locator(".seen").inner_text() == said


@pytest.mark.parametrize("make", made_up.HANDS, ids=named)
@pytest.mark.parametrize("width", [1400, 400])
def test_nothing_is_cut_off(make, width, alone):
    page = alone(make())
    page.set_viewport_size({"width": width, "height": 900})
    parts = ".still, svg, canvas, button, select, input, p"
    assert page.locator(".uqlab-hand").evaluate(RIGHT, parts) <= width


def test_an_exported_page_has_explorers_that_answer(browser, tmp_path):
    """As nbconvert makes it, read from a file while nothing can be loaded from anywhere."""
    made = [make() for make in made_up.HANDS]
    notebook = new_notebook()
    for each in made:
        bundle = each._repr_mimebundle_()
        bundle = bundle[0] if isinstance(bundle, tuple) else bundle
        shown = new_output("display_data", bundle)
        notebook.cells.append(new_code_cell("", outputs=[shown]))
    (tmp_path / "page.html").write_text(HTMLExporter().from_notebook_node(notebook)[0])
    page = browser.new_page(viewport={"width": 900, "height": 800})
    page.route("https://**/*", lambda route: route.abort())
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator("iframe").count() == len(made)
    for at in range(len(made)):
        frame = page.locator("iframe").nth(at)
        frame.content_frame.locator(".seen").first.wait_for(state="attached")
        needed = frame.content_frame.locator("body").evaluate("b => b.offsetHeight")
        assert frame.bounding_box()["height"] >= needed > 80
    inner = page.frame_locator("iframe[title='cloud']")
    before = inner.locator(".seen").inner_text()
    inner.locator(".member").first.press("ArrowUp")
    assert inner.locator(".seen").inner_text() != before
    inner = page.frame_locator("iframe[title='frames']").first
    slider, seen = inner.locator("[type=range]").first, set()
    for key in ("Home", "End"):
        slider.press(key)
        seen.add(inner.locator("img").get_attribute("src"))
    assert len(seen) == 2
    inner = page.frame_locator("iframe[title='guess']")
    inner.get_by_role("slider").press("End")
    inner.get_by_role("button").press("Enter")
    assert "The order stays." in inner.locator(".seen").inner_text()
    page.close()


def test_the_guide_in_the_book_has_one_that_lives(browser, tmp_path, monkeypatch):
    """As the book's source has it, made into HTML without Sphinx, which tests do not need."""
    for name in ("docutils", "latex2mathml", "latex2mathml.converter"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    book = Path(__file__).parents[2] / "book"
    conf = runpy.run_path(str(book / "conf.py"))
    guide = (book / "guides" / "explorers.md").read_text()
    html = markdown2html(conf["ALIVE"].sub(conf["alive"], guide))
    (tmp_path / "guide.html").write_text(f"<!doctype html>{html}")
    page, wanted = browser.new_page(viewport={"width": 900, "height": 800}), []
    page.on("request", lambda request: wanted.append(request.url))
    page.goto((tmp_path / "guide.html").as_uri())
    hand = page.frame_locator("iframe[title='cloud']").locator(".uqlab-hand")
    before = bars(hand)
    drag(hand, 0, (170, 150))
    assert abs(bars(hand)["aleatoric"] - before["aleatoric"]) > 0.01
    page.close()
    assert [url for url in wanted if not url.startswith("file:")] == []


VIEW = {"viewport": {"width": 1280, "height": 900}}


def test_lab_opens_the_index_and_its_links_open_notebooks(browser, tmp_path):
    with lab.server(tmp_path, "uqlab.runs", "lab") as address:
        page = lab.Lab(browser.new_page(**VIEW), address)
        page.page.goto(address.format(path=""))
        index = page.page.locator(".jp-RenderedMarkdown")
        index.locator("table").first.wait_for()
        title = "00 What is it that we do not know?"
        index.get_by_role("link", name=title).first.click()
        page.page.locator(".jp-NotebookPanel .jp-RenderedMarkdown h1").first.wait_for()
        page.close()


def test_a_dragged_cloud_is_in_the_kernel(browser, tmp_path):
    path = f"import sys; sys.path.append({str(Path(made_up.__file__).parent)!r})"
    made = f"{path}\nimport made_up\ncloud = made_up.cloud()\ncloud"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    page = new_notebook(cells=[new_code_cell(made)], metadata={"kernelspec": kernel})
    nbformat.write(page, tmp_path / "page.ipynb")
    root = f"--ServerApp.root_dir={tmp_path}"
    with lab.server(tmp_path, "jupyterlab", root) as address:
        page = lab.Lab(browser.new_page(**VIEW), address)
        page.open("page.ipynb")
        hand = page.show("made_up.cloud", ".uqlab-hand")
        hand.locator(".dot").first.wait_for()
        drag(hand, 2, (170, 200))
        hand.get_by_label("jackknife").check()
        page.page.wait_for_timeout(300)
        state = json.loads(page.ask("import json; print(json.dumps(cloud.state))"))
        shown, expected = bars(hand), decomposed(state)
        assert state["jackknife"]
        assert shown == pytest.approx({k: expected[k] for k in shown}, abs=1e-6)
        hand.locator(".member").first.press("c")  # JupyterLab's own keys sleep
        assert hand.locator(".member").count() == 6
        assert page.errors == []
        page.close()
