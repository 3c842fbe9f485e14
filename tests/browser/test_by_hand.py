"""Explorers that answer the hand, alone in a browser without a kernel or a network, and in JupyterLab with a kernel."""

import json

import made_up
import numpy as np
import pytest
import torch
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook, new_output

from uqlab import metrics, scoreboard, uncertainty, widgets

OURS = "\nObject.assign(window, {functions});"  # makes functions of a module reachable from the test


@pytest.fixture
def alone(browser):
    """Open an explorer's own page; whatever it asks from outside is refused and fails the test."""
    pages, wanted, errors = [], [], []

    def open_(hand: widgets.Hand, functions: str = "{}", **how):
        page = browser.new_page(viewport={"width": 900, "height": 800}, **how)
        page.route("**/*", lambda route: (wanted.append(route.request.url), route.abort()))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.set_content(hand.html().replace("\nrender({", OURS.format(functions=functions) + "\nrender({"))
        page.locator(".uqlab-hand .seen").first.wait_for(state="attached")
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.close()
    assert wanted == []
    assert errors == []


def bars(page) -> dict[str, float]:
    return {bar.get_attribute("data-name"): float(bar.get_attribute("data-value"))
            for bar in page.locator(".bars [data-name]").all()}  # fmt: skip


def drag(explorer, m: int, to, steps: int = 3) -> None:
    """Drag a member to a place of the triangle's drawing."""
    stage = explorer.locator(".stage")
    stage.scroll_into_view_if_needed()
    place, zoom = stage.bounding_box(), stage.bounding_box()["width"] / 340
    start = stage.locator(".member").nth(m).locator(".dot").bounding_box()
    mouse = stage.page.mouse
    mouse.move(start["x"] + start["width"] / 2, start["y"] + start["height"] / 2)
    mouse.down()
    mouse.move(place["x"] + to[0] * zoom, place["y"] + to[1] * zoom, steps=steps)
    mouse.up()


def decomposed(state: dict) -> dict[str, float]:
    """What the package makes of a cloud's members and groups."""
    p = torch.tensor(state["members"], dtype=torch.float64)
    order = torch.tensor(state["groups"] or range(len(p))).argsort(stable=True)
    groups = len({*(state["groups"] or range(len(p)))})
    logits = p[order].clamp_min(1e-300).log().view(groups, -1, 1, 3)
    part = uncertainty.decompose_groups(logits, "jackknife" if state["jackknife"] else None)
    return {name: getattr(part, name).item() for name in ("total", "aleatoric", "epistemic", "between", "within")}


def test_arithmetic_is_that_of_the_package(alone):
    page, rng = alone(made_up.cloud(), "{ decompose, auroc, quantile }"), np.random.default_rng(0)
    for trial in range(24):
        groups, size = int(rng.integers(2, 6)), int(rng.integers(1, 5))
        p = rng.dirichlet([[0.05, 1.0, 20.0][trial % 3]] * 3, groups * size)
        state = {"members": p.tolist(), "groups": np.arange(groups).repeat(size).tolist(), "jackknife": trial % 2 == 1}
        found = page.evaluate("s => decompose(s.members, s.groups, s.jackknife)", state)
        assert {name: found[name] for name in decomposed(state)} == pytest.approx(decomposed(state), abs=1e-9)
    a, b = rng.integers(0, 9, 50).tolist(), rng.integers(3, 12, 70).tolist()  # with ties
    expected = metrics.ood_detection(torch.tensor(a).double(), torch.tensor(b).double()).auroc
    assert page.evaluate("([a, b]) => auroc(a, b)", [a, b]) == pytest.approx(expected, abs=1e-9)
    assert page.evaluate("a => quantile(a, 0.3)", a) == pytest.approx(np.quantile(a, 0.3), abs=1e-9)


def test_cloud_follows_the_mouse_and_the_keys_to_its_missions(alone):
    page = alone(widgets.cloud(2 * torch.eye(3)))  # three members that do not cover each other
    first, done = bars(page), page.locator("[data-done=true]")
    ring = [float(page.locator(".ring").get_attribute(f"c{axis}")) for axis in "xy"]
    drag(page, 0, (340, 315))  # beyond the corner B
    assert "A 0.00, B 1.00, C 0.00" in page.locator(".member").nth(0).get_attribute("aria-label")
    assert bars(page) != first
    assert done.count() == 0
    for m in range(3):
        drag(page, m, ring)
    assert bars(page)["epistemic"] < 0.005
    assert done.count() == 1
    page.get_by_role("button", name="reset").click()
    assert bars(page) == first
    page.locator(".member").nth(1).focus()
    page.keyboard.press("ArrowUp")
    moved = bars(page)
    assert moved != first
    for _ in range(9):
        page.keyboard.press("c")
    assert page.locator(".member").count() == 12
    assert done.count() == 2
    for _ in range(9):
        page.keyboard.press("Delete")
    assert bars(page) == pytest.approx(moved)


def test_groups_hide_everything_or_nothing(alone):
    page = alone(widgets.cloud(9 * torch.eye(3)[torch.arange(6) % 3], [0, 0, 1, 1, 2, 2]))
    assert 0.05 < bars(page)["between"] / bars(page)["epistemic"] < 0.9
    for m, key in enumerate("111222"):  # one of each camp in either group
        page.locator(".member").nth(m).focus()
        page.keyboard.press(key)
    assert bars(page)["between"] < 1e-9
    page.get_by_label("jackknife over groups").check()
    for k in range(3):  # by clicks: each group a camp
        page.get_by_role("button", name=f"group {k + 1}", exact=True).click()
        for m in (k, k + 3):
            page.locator(".member").nth(m).dispatch_event("pointerdown", {"pointerId": 1, "bubbles": True})
            page.locator(".stage").dispatch_event("pointerup", {"pointerId": 1, "bubbles": True})
    assert bars(page)["within"] < 1e-9
    assert page.locator("[data-done=true]").count() == 2


def test_alarm_counts_what_the_metrics_count(alone):
    hand = made_up.alarm()
    page = alone(hand)
    known = [torch.tensor(row).double() for row in hand.data["known"]["values"]]
    slider = page.get_by_role("slider")
    for s, stranger in enumerate(hand.data["strangers"]):
        page.get_by_role("combobox").select_option(index=s)
        for at, key in ((0, "Home"), (1, "End")):
            slider.focus()
            page.keyboard.press(key)
            values = torch.tensor(stranger["values"][at]).double()
            for anew in (False, True):
                page.get_by_label("anew").set_checked(anew)
                line = known[at if anew else 0].quantile(0.95)
                share, auroc = (values > line).double().mean(), metrics.ood_detection(known[at], values).auroc
                shown = [page.locator(f"[data-name={name}]") for name in ("AUROC", "caught")]
                page.wait_for_timeout(40)  # two frames
                found = [float(each.get_attribute("data-value")) for each in shown]
                assert found == pytest.approx([auroc, share.item()], abs=1e-6)
                caught = [int(i) for i, v in enumerate(stranger["shown"]) if values[v] > line]
                framed = [
                    i for i, image in enumerate(page.locator("img").all()) if image.get_attribute("class") == "caught"
                ]
                assert framed == caught
                silent = at == 1 and not anew  # all values are a sixteenth of those before
                assert ("The order stays, the scale collapses" in page.locator(".seen").inner_text()) == silent
    assert page.locator(".uqlab-hand b").count() == 0  # the set "<b>mine</b>" is text
    assert "<b>mine</b>" in page.locator(".seen").inner_text()


def test_front_recommends_as_the_scoreboard_does(alone):
    hand = made_up.front()
    page, rng = alone(hand, "{ recommend, brief }"), np.random.default_rng(1)
    for name, board in {"made up": made_up.board(), "other": made_up.board(("single", "deep", "tiles"))}.items():
        for _ in range(8):
            quality = str(rng.choice(["nll", "accuracy"]))
            limits = {column: float(rng.choice(places)) for column, _, places in hand.data["limits"]}
            limits["stored"] *= float(rng.choice([1e-9, 1, 1], p=[0.1, 0.45, 0.45]))
            expected = scoreboard.recommend(board, quality, limits, repeats=200)
            asked = [hand.data["boards"][name], quality, list(map(list, limits.items())), hand.data["less"]]
            assert page.evaluate("a => recommend(...a).reason", asked) == expected.reason
    for number in (0.0, 1e-5, 0.00012345, 0.5, 99.96, 999.9, 123456.0, -0.0321):
        assert page.evaluate("brief", number) == f"{number:.3g}"
    board = made_up.board()
    slider = page.get_by_role("slider").first
    slider.focus()
    page.keyboard.press("Home")
    least = {column: places[0 if column == "stored" else -1] for column, _, places in hand.data["limits"]}
    expected = scoreboard.recommend(board, "nll", least, repeats=200)
    page.wait_for_function(
        "said => document.querySelector('.seen').textContent.endsWith(said)", arg=expected.reason[1:]
    )
    assert page.locator("[data-state=dear]").count() == len(expected.refused)
    page.locator(".method").nth(1).focus()
    page.keyboard.press("Enter")
    assert "explicit ensemble" in page.locator(".about").inner_text()
    page.get_by_role("combobox", name="network").select_option("other")
    assert page.locator(".method").count() == 3


def test_head_map_is_picked_by_clicks_and_by_keys(alone):
    hand = made_up.head_map()
    page = alone(hand)

    def says(*words: str) -> None:
        line = "document.querySelector('.seen').textContent"
        page.wait_for_function(f"words => words.every(word => {line}.includes(word))", arg=words)

    says("2 of 4 heads removed, accuracy 0.700", "layer 1, head 1;", "without it alone: accuracy 0.850")
    page.get_by_role("button", name="layer 0, head 0").click()
    seen = hand.data["clouds"][2][0][0]
    says("layer 0, head 0;", "{:.2f} Euclidean, {:.2f} Mahalanobis".format(*seen["apart"][0]))
    places = page.locator(".cloud").evaluate_all(
        "clouds => clouds.map(cloud => cloud.getAttribute('d').split('M').length)"
    )
    assert places == [31, 31]
    page.keyboard.press("ArrowRight")
    says("layer 0, head 1 (removed too)")
    page.keyboard.press("ArrowUp")  # the map ends here
    page.keyboard.press("ArrowDown")
    assert page.locator(".head[tabindex='0']").get_attribute("aria-label").startswith("layer 1, head 1: ")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    page.get_by_role("combobox").select_option(label="near")
    page.get_by_role("slider").press("Home")
    says("0 of 4 heads removed, accuracy 0.900", "near (blue)",
         "{:.2f} Euclidean, {:.2f} Mahalanobis".format(*hand.data["clouds"][0][1][1]["apart"][1]))  # fmt: skip
    page.get_by_role("button", name="reset").click()
    says("2 of 4 heads removed", "far (blue)")


def test_draw_without_a_kernel_says_so_and_goes_on_drawing(alone):
    page = alone(made_up.draw())
    assert "The kernel does not answer" in page.locator(".seen").inner_text()
    canvas, pixels = page.locator("canvas"), "canvas => canvas.getContext('2d').getImageData(0, 0, 8, 8).data"
    ink = f"canvas => ({pixels})(canvas).filter(value => value > 99).length"
    page.get_by_role("button", name="clear").click()
    page.wait_for_timeout(40)  # two frames
    assert canvas.evaluate(ink) == 64  # black, and not transparent
    canvas.focus()
    page.keyboard.press(" ")
    page.wait_for_timeout(40)
    assert canvas.evaluate(ink) > 64


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
    assert shown == pytest.approx({name: decomposed(state)[name] for name in shown}, abs=1e-6)
    hand.locator(".member").first.focus()
    page.keyboard.press("ArrowUp")  # JupyterLab's own keys sleep
    assert bars(hand) != shown
    page.keyboard.press("c")
    assert hand.locator(".member").count() == 6
    assert made_up_page.errors == []


def test_a_drawing_is_answered_as_the_package_predicts_soon_or_with_patience(made_up_page):
    hand = made_up_page.show(r"made_up.draw", ".uqlab-hand")
    hand.locator(".cell").first.wait_for()
    page, canvas, seen = made_up_page.page, hand.locator("canvas"), hand.locator(".seen")
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
            shown = hand.locator(".cell").evaluate_all("cells => cells.map(cell => +cell.dataset.value)")
            if shown == pytest.approx(expected, abs=1e-6):
                break
        assert shown == pytest.approx(expected, abs=1e-6)
        assert "Answered" in seen.inner_text()
        return asked

    hand.get_by_label("blend").press("End")  # the second example
    blended = answered()
    hand.get_by_role("button", name="clear").click()
    place = canvas.bounding_box()
    page.mouse.move(place["x"] + 0.3 * place["width"], place["y"] + 0.2 * place["height"])
    page.mouse.down()
    page.mouse.move(place["x"] + 0.6 * place["width"], place["y"] + 0.8 * place["height"], steps=6)
    page.mouse.up()
    drawn = answered()
    red = "canvas => [...canvas.getContext('2d').getImageData(0, 0, 8, 8).data].filter((_, i) => i % 4 === 0)"
    assert drawn == canvas.evaluate(red)
    assert blended != drawn
    hand.get_by_label("width").select_option("wide")
    assert answered() == drawn
    canvas.focus()
    for key in ("Delete", "ArrowUp", " ", "ArrowRight", " "):  # the canvas' keys, not JupyterLab's
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


# Without a kernel -----------------------------------------------------------------------------------------------------
def test_an_exported_page_has_explorers_that_answer(browser, tmp_path):
    """As nbconvert makes it, read from a file while nothing can be loaded from anywhere."""
    made = {make.__name__: make() for make in (*made_up.HANDS, made_up.collapse)}
    notebook = new_notebook()
    for name, each in made.items():
        bundle = each._repr_mimebundle_()
        shown = new_output("display_data", bundle[0] if isinstance(bundle, tuple) else bundle)
        notebook.cells.append(new_code_cell(name, outputs=[shown]))
    (tmp_path / "page.html").write_text(HTMLExporter().from_notebook_node(notebook)[0])
    page, errors = browser.new_page(viewport={"width": 900, "height": 800}), []
    page.route("**/*", lambda route: route.continue_() if route.request.url.startswith("file:") else route.abort())
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator("iframe").count() == len(made_up.HANDS)
    for name in (make.__name__ for make in made_up.HANDS):
        inner = page.frame_locator(f"iframe[title='{made[name].name}']")
        inner.locator(".seen").first.wait_for(state="attached")
        needed = inner.locator("body").evaluate("body => body.offsetHeight")
        assert page.locator(f"iframe[title='{made[name].name}']").bounding_box()["height"] >= needed > 200, name
    inner = page.frame_locator("iframe[title='cloud']")
    before = inner.locator(".seen").inner_text()
    inner.locator(".member").first.press("ArrowUp")
    assert inner.locator(".seen").inner_text() != before
    assert page.get_by_text("its controls need a running kernel").count() == 1
    assert page.locator("img[alt='What the line above says.']").evaluate("picture => picture.naturalWidth") > 300
    page.close()
    assert [error for error in errors if "require" not in error and "MathJax" not in error] == []
