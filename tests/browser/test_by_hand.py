"""Explorers that answer the hand in JupyterLab with a kernel, and in an exported page."""

import json
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import lab
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


def test_a_drawing_is_answered_as_the_package_predicts_soon_or_with_patience(
    made_up_page,
):
    hand = made_up_page.show(r"made_up.draw", ".uqlab-hand")
    hand.locator(".cell").first.wait_for()
    page, canvas, seen = (
        made_up_page.page,
        hand.locator("canvas"),
        hand.locator(".seen"),
    )
    wait = "kept, late, soon = [], [], draw.answer\nimport time\n"  # `late`: seconds that answers take, each once
    wait += "draw.answer = lambda m: kept.append(m) or (late and time.sleep(late.pop())) or soon(m)"
    assert made_up_page.ask(wait) == ""
    code = """import json, torch
from uqlab import training
x = torch.tensor(kept[-1]["pixels"]).view(1, 1, 8, 8) / 255
p = training.predict(made_up.networks()[0][kept[-1]["model"]], x)[:, 0].double().softmax(-1)
print(json.dumps([kept[-1]["pixels"], torch.cat([p.mean(0, keepdim=True), p]).flatten().tolist()]))"""

    def answered() -> list[int]:
        """Compare what is shown with the package; returns the pixels that the kernel was asked about."""
        for _ in range(20):  # a busy machine answers late
            page.wait_for_timeout(400)
            asked, expected = json.loads(made_up_page.ask(code))
            shown = hand.locator(".cell").evaluate_all(
                "cells => cells.map(cell => +cell.dataset.value)"
            )
            if shown == pytest.approx(expected, abs=1e-6):
                break
        assert shown == pytest.approx(expected, abs=1e-6)
        assert "Answered" in seen.inner_text()
        return asked

    hand.get_by_label("blend").press("End")  # the second example
    blended = answered()
    hand.get_by_role("button", name="clear").click()
    place = canvas.bounding_box()
    page.mouse.move(
        place["x"] + 0.3 * place["width"], place["y"] + 0.2 * place["height"]
    )
    page.mouse.down()
    page.mouse.move(
        place["x"] + 0.6 * place["width"], place["y"] + 0.8 * place["height"], steps=6
    )
    page.mouse.up()
    drawn = answered()
    red = "canvas => [...canvas.getContext('2d').getImageData(0, 0, 8, 8).data].filter((_, i) => i % 4 === 0)"
    assert drawn == canvas.evaluate(red)
    assert blended != drawn
    hand.get_by_label("width").select_option("wide")
    assert answered() == drawn
    canvas.focus()
    for key in (
        "Delete",
        "ArrowUp",
        " ",
        "ArrowRight",
        " ",
    ):  # the canvas' keys, not JupyterLab's
        page.keyboard.press(key)
    keyed = answered()
    assert 0 < sum(value > 99 for value in keyed) < sum(value > 99 for value in drawn)
    times = []
    for _ in range(5):
        hand.get_by_label("blend").press("ArrowLeft")
        page.wait_for_timeout(150)
        times.append(float(seen.get_attribute("data-milliseconds")))
    assert "50 %" in hand.locator(".slider output").inner_text()
    assert sorted(times)[2] < 300, times  # 100 ms alone: benchmarks/explorers.py

    assert made_up_page.ask("late.append(4)") == ""
    hand.get_by_role("button", name="clear").click()
    seen.filter(has_text="does not answer").wait_for()
    hand.get_by_role("button", name="forget").click()
    assert hand.locator(".now").count() == 0
    seen.filter(has_text="Answered").wait_for()
    assert made_up_page.errors == []


KERNEL = "jupyterapp.shell.currentWidget.sessionContext.session.kernel"
SLEEPS = "import time\nquick, late = draw.answer, []\ndraw.answer = lambda m: (late and time.sleep(late.pop())) or quick(m)"


def interrupt(page) -> None:
    page.wait_for_timeout(500)  # until the kernel has begun what is interrupted
    page.evaluate("jupyterapp.commands.execute('notebook:interrupt-kernel')")


def test_the_interrupt_button_stops_the_cell_and_no_explorer(made_up_page):
    """As JupyterLab is: explorers' messages go to a thread of the kernel, which an interrupt leaves alone."""
    page, hand = made_up_page.page, made_up_page.show(r"made_up.draw", ".uqlab-hand")
    seen = hand.locator(".seen")
    hand.locator(".cell").first.wait_for()
    assert made_up_page.ask(f"{SLEEPS}\nlate.append(6)") == ""
    page.evaluate(
        f"() => {{ window.slept = {KERNEL}.requestExecute({{code: 'time.sleep(90)'}}).done; }}"
    )
    hand.get_by_role("button", name="clear").click()
    seen.filter(has_text="does not answer: it is busy").wait_for()
    cloud = made_up_page.show(r"made_up.cloud", ".uqlab-hand")
    before = bars(cloud)
    cloud.locator(".member").first.press("ArrowLeft")
    assert bars(cloud) != before
    page.locator("[data-command='notebook:interrupt-kernel']").locator(
        "visible=true"
    ).first.click()
    assert (
        page.evaluate("window.slept.then(reply => reply.content.ename)")
        == "KeyboardInterrupt"
    )
    made_up_page.show(r"made_up.draw", ".uqlab-hand")
    seen.filter(has_text="Answered").wait_for()  # late, but it comes
    hand.get_by_label("blend").press("End")
    page.wait_for_function(
        "seen => +seen.dataset.milliseconds < 3000", arg=seen.element_handle()
    )
    assert made_up_page.errors == []


def test_an_interrupted_kernel_says_so_and_what_needs_no_kernel_goes_on(
    browser, address, small_page
):
    """Where messages go to the kernel's main thread: in an older JupyterLab, in VS Code or Colab."""
    lab_page = lab.Lab(
        browser.new_page(viewport={"width": 1280, "height": 900}), address
    )
    page = lab_page.page
    lab_page.open(small_page("interrupted", [made_up.draw, made_up.cloud]))
    page.evaluate(f"""async () => {{
      await jupyterapp.shell.currentWidget.sessionContext.ready;
      {KERNEL}.commsOverSubshells = 'disabled';
    }}""")
    lab_page.start()
    assert lab_page.finish() == []
    hand = lab_page.show(r"made_up.draw", ".uqlab-hand")
    seen, clear = hand.locator(".seen"), hand.get_by_role("button", name="clear")
    hand.locator(".cell").first.wait_for()
    assert lab_page.ask(f"{SLEEPS}\nlate.append(90)") == ""
    clear.click()
    seen.filter(
        has_text="does not answer: it is busy, interrupted or absent. You can go on drawing"
    ).wait_for()
    cloud = lab_page.show(r"made_up.cloud", ".uqlab-hand")
    before = bars(cloud)
    drag(cloud, 1, (150, 180))
    assert bars(cloud) != before
    interrupt(page)
    lab_page.show(r"made_up.draw", ".uqlab-hand")
    seen.filter(
        has_text="No answer: the kernel was interrupted. The next move asks it again."
    ).wait_for()
    hand.get_by_label("blend").press("ArrowRight")
    seen.filter(has_text="Answered").wait_for()

    lab_page.shut_kernel()
    clear.click()
    seen.filter(has_text="does not answer").wait_for()
    assert lab_page.errors == []
    page.close()


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
