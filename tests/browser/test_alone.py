"""Explorers that answer the hand, alone in a browser: without a kernel, without a network."""

import made_up
import numpy as np
import pytest
import torch
from by_hand import bars, decomposed, drag, drawn

from uqlab import metrics, training, widgets
from uqlab.study import scoreboard


def test_arithmetic_is_that_of_the_package(alone):
    page = alone(made_up.cloud(), "{ decompose, auroc, quantile }")
    rng = np.random.default_rng(0)
    for trial in range(24):
        groups, size = int(rng.integers(2, 6)), int(rng.integers(1, 5))
        p = rng.dirichlet([[0.05, 1.0, 20.0][trial % 3]] * 3, groups * size)
        of = np.arange(groups).repeat(size).tolist()
        state = {"members": p.tolist(), "groups": of, "jackknife": trial % 2 == 1}
        found = page.evaluate("s => decompose(s.members, s.groups, s.jackknife)", state)
        expected = decomposed(state)
        assert {k: found[k] for k in expected} == pytest.approx(expected, abs=1e-9)
    a, b = (rng.integers(*ends, 60).tolist() for ends in ((0, 9), (3, 12)))  # ties
    expected = metrics.ood_detection(*map(torch.DoubleTensor, (a, b))).auroc
    assert page.evaluate("([a, b]) => auroc(a, b)", [a, b]) == pytest.approx(expected)
    found = page.evaluate("a => quantile(a, 0.3)", a)
    assert found == pytest.approx(np.quantile(a, 0.3))


def test_cloud_follows_the_mouse_and_the_keys_to_its_missions(alone):
    page = alone(widgets.cloud(2 * torch.eye(3)))  # three that do not cover each other
    first, done = bars(page), page.locator("[data-done=true]")
    ring = [float(page.locator(".ring").get_attribute(f"c{axis}")) for axis in "xy"]
    drag(page, 0, (340, 315))  # beyond the corner B
    said = page.locator(".member").nth(0).get_attribute("aria-label")
    assert "A 0.00, B 1.00, C 0.00" in said
    assert (bars(page) != first, done.count()) == (True, 0)
    for m in range(3):
        drag(page, m, ring)
    assert bars(page)["epistemic"] < 0.005
    assert done.count() == 1
    page.get_by_role("button", name="reset").click()
    assert bars(page) == first
    page.locator(".member").nth(1).press("ArrowUp")
    moved = bars(page)
    assert moved != first
    for _ in range(9):
        page.keyboard.press("c")
    assert (page.locator(".member").count(), done.count()) == (12, 2)
    for _ in range(9):
        page.keyboard.press("Delete")
    assert bars(page) == pytest.approx(moved)


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize(("at", "key"), [(0, "Home"), (1, "End")])
def test_alarm_counts_what_the_metrics_count(alone, at, key, anew):
    hand = made_up.alarm()
    page = alone(hand)
    known = [torch.DoubleTensor(row) for row in hand.data["known"]["values"]]
    page.get_by_role("slider").press(key)
    page.get_by_label("anew").set_checked(anew)
    for s, other in enumerate(hand.data["outside"]):
        page.get_by_role("combobox").select_option(index=s)
        drawn(page)
        values = torch.DoubleTensor(other["values"][at])
        caught = values > known[at if anew else 0].quantile(0.95)
        auroc = metrics.ood_detection(known[at], values).auroc
        for name, number in {"AUROC": auroc, "caught": caught.double().mean()}.items():
            shown = page.locator(f"[data-name={name}]").get_attribute("data-value")
            assert float(shown) == pytest.approx(float(number), abs=1e-6)
        framed = [
            image.get_attribute("class") == "caught"
            for image in page.locator("img").all()
        ]
        assert [i for i, yes in enumerate(framed) if yes] == [
            i for i, v in enumerate(other["shown"]) if caught[v]
        ]
        silent = (
            "The ranking stays, the level collapses"
            in page.locator(".seen").inner_text()
        )
        assert silent == (at == 1 and not anew)  # a sixteenth of the values before
    assert page.locator(".uqlab-hand b").count() == 0  # the set "<b>mine</b>" is text


def test_an_alarm_of_one_setting_passes_as_many_as_the_reader_chooses(alone):
    x = torch.arange(1.0, 41.0).double()
    values = {"narrow": {"id": x, "far": x + 8}}
    images = {"far": torch.rand(40, 1, 4, 4)}
    page = alone(widgets.alarm(values, images, passing=[0.5, 0.95]))
    caught = page.locator("[data-name=caught]")
    for key, share in {"Home": 0.5, "End": 0.95}.items():
        page.get_by_role("slider").press(key)
        drawn(page)
        expected = (x + 8 > x.quantile(share)).double().mean().item()
        found = float(caught.get_attribute("data-value"))
        assert found == pytest.approx(expected, abs=1e-6)
    assert "where 95 % of id pass. It catches" in page.locator(".seen").inner_text()


def test_front_recommends_as_the_scoreboard_does(alone):
    hand = made_up.front()
    page, rng = alone(hand, "{ recommend }"), np.random.default_rng(1)
    others = ("single", "deep", "tiles")
    boards = {"made up": made_up.board(), "other": made_up.board(others)}
    for name, board in boards.items():
        for _ in range(8):
            quality = str(rng.choice(["nll", "accuracy"]))
            limits = {c: float(rng.choice(p)) for c, _, p in hand.data["limits"]}
            limits["stored"] *= float(rng.choice([1e-9, 1, 1], p=[0.1, 0.45, 0.45]))
            expected = scoreboard.recommend(board, quality, limits)
            asked = [hand.data["boards"][name], quality, [*map(list, limits.items())]]
            asked.append(hand.data["less"])
            said = page.evaluate("a => recommend(...a).reason", asked)
            assert said == expected.reason
    page.get_by_role("slider").first.press("Home")
    ends = {c: p[0 if c == "stored" else -1] for c, _, p in hand.data["limits"]}
    expected = scoreboard.recommend(boards["made up"], "nll", ends)
    page.wait_for_function(
        "said => document.querySelector('.seen').textContent.endsWith(said)",
        arg=expected.reason[1:],
    )
    assert page.locator("[data-state=dear]").count() == len(expected.refused)
    page.get_by_role("combobox", name="network").select_option("other")
    assert page.locator(".method").count() == 3


def test_head_map_is_picked_by_clicks_and_by_keys(alone):
    hand = made_up.head_map()
    page = alone(hand)

    def says(*words: str) -> None:
        line = "document.querySelector('.seen').textContent"
        page.wait_for_function(
            f"words => words.every(word => {line}.includes(word))", arg=words
        )

    says(
        "2 of 4 heads removed, accuracy 0.700",
        "layer 1, head 1;",
        "without it alone: accuracy 0.850",
    )
    page.get_by_role("button", name="layer 0, head 0").click()
    seen = hand.data["clouds"][2][0][0]
    says(
        "layer 0, head 0;",
        "{:.2f} Euclidean, {:.2f} Mahalanobis".format(*seen["apart"][0]),
    )
    places = page.locator(".cloud").evaluate_all(
        "clouds => clouds.map(cloud => cloud.getAttribute('d').split('M').length)"
    )
    assert places == [31, 31]
    page.keyboard.press("ArrowRight")
    says("layer 0, head 1 (removed too)")
    page.keyboard.press("ArrowUp")  # the map ends here
    page.keyboard.press("ArrowDown")
    assert (
        page.locator(".head[tabindex='0']")
        .get_attribute("aria-label")
        .startswith("layer 1, head 1: ")
    )
    assert (
        page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    )
    page.get_by_role("combobox").select_option(label="near")
    page.get_by_role("slider").press("Home")
    says("0 of 4 heads removed, accuracy 0.900", "near (blue)",
         "{:.2f} Euclidean, {:.2f} Mahalanobis".format(*hand.data["clouds"][0][1][1]["apart"][1]))  # fmt: skip
    page.get_by_role("button", name="reset").click()
    says("2 of 4 heads removed", "far (blue)")


RED = """canvas => [...canvas.getContext('2d').getImageData(0, 0, 8, 8).data]
  .filter((_, i) => i % 4 === 0)"""


def test_a_drawing_is_answered_as_the_package_predicts(alone):
    page = alone(made_up.draw())
    networks = made_up.networks()[0]
    canvas, seen = page.locator("canvas"), page.locator(".seen")

    def answered(name="narrow") -> list[int]:
        """Compare what is shown with the package; return what is drawn."""
        drawn(page)
        drawn(page)
        pixels = canvas.evaluate(RED)
        x = torch.tensor(pixels).view(1, 1, 8, 8) / 255
        p = training.predict(networks[name], x)[:, 0].softmax(-1)
        shown = page.locator(".cell").evaluate_all(
            "cells => cells.map(cell => +cell.dataset.value)"
        )
        expected = torch.cat([p.mean(0, keepdim=True), p]).flatten().tolist()
        assert shown == pytest.approx(expected, abs=2e-3)
        return pixels

    first = answered()
    page.get_by_label("blend").press("End")  # the second example
    blended = answered()
    assert blended != first
    page.get_by_role("button", name="clear").click()
    assert sum(answered()) == 0
    place = canvas.bounding_box()
    x, y, width, height = (place[name] for name in ("x", "y", "width", "height"))
    page.mouse.move(x + 0.3 * width, y + 0.2 * height)
    page.mouse.down()
    page.mouse.move(x + 0.6 * width, y + 0.8 * height, steps=6)
    page.mouse.up()
    by_mouse = answered()
    assert sum(value > 99 for value in by_mouse) > 3
    page.get_by_label("width").select_option("wide")
    assert answered("wide") == by_mouse
    said = seen.inner_text()
    canvas.focus()
    for key in ("Delete", "ArrowUp", " "):
        page.keyboard.press(key)
    drawn(page)
    assert sum(canvas.evaluate(RED)) > 0
    assert page.locator(".wall img").count() == 4
    assert "nats in total" in said != seen.inner_text()
    page.locator(".past").last.press("Enter")  # shows that drawing again
    drawn(page)
    drawn(page)
    assert seen.inner_text() == said
    page.get_by_role("button", name="forget").click()
    assert page.locator(".now").count() == 0


# A guess -----------------------------------------------------------------------------------------------------------------
def test_a_guess_by_keys_opens_what_it_hides(alone):
    page = alone(made_up.guess(), "{ kept }")
    said, slider = page.locator(".seen"), page.get_by_role("slider")
    assert said.inner_text() == ""
    assert "The order" not in page.locator("body").inner_text()
    assert page.locator(".question em").inner_text() == "accuracy"
    slider.press("Home")
    for _ in range(4):
        slider.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "0.4 points"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert "Your guess: 0.4 points." in said.inner_text()
    assert (
        "The answer: 1.2 points. Your guess was 0.8 points too low."
        in said.inner_text()
    )
    assert said.locator("strong").nth(1).inner_text() == "The order"
    assert said.locator("code").inner_text() == "scale"
    assert "<b>falls</b>" in said.inner_text()  # text, and no tag
    assert page.evaluate("kept.state.guess") == 0.4
    assert page.evaluate("document.activeElement.textContent").startswith("Your guess")
    assert slider.is_disabled()  # a guess that was made stands
    drawn(page)
    you, answer = page.locator(".scale circle"), page.locator(".scale .answer")
    assert you.bounding_box()["x"] < answer.bounding_box()["x"]


def test_spectra_count_intruders_at_any_threshold(alone):
    hand = made_up.spectra()
    page, said = alone(hand), "document.querySelector('.seen').textContent"
    for method, layer, member in ((0, 0, 0), (1, 1, 1)):
        found = hand.data["after"][method][layer][member]
        page.get_by_label("method").select_option(index=method)
        page.get_by_label("layer").select_option(index=layer)
        page.get_by_label("member").fill(str(member))
        for k, place in ((3, 4), (12, 17)):
            page.get_by_label("directions k").fill(str(k - 1))
            page.get_by_label("threshold").fill(str(place))
            drawn(page)
            largest, squares = (
                np.array(found["largest"][:k]),
                np.square(found["values"][:k]),
            )
            strange = largest < (place + 1) / 20
            energy = 100 * squares[strange].sum() / squares.sum()
            assert page.evaluate(said).startswith(
                f"{strange.sum()} of {k} leading directions are intruders (red), with "
                f"{energy:.0f} % of the energy"
            )
            assert (
                page.locator(".intruders").get_attribute("d").count("M")
                == strange.sum()
            )
    assert f"{hand.data['level'][1]:.2f} on average" in page.evaluate(said)


# What each thing under the focus is called, and which parts can have the focus.
CALLED = """() => {
  const each = document.activeElement, names = [each.getAttribute('aria-label'), each.labels?.[0]?.textContent];
  return [...names, each.textContent, each.title].find(name => name?.trim()) ?? '';
}"""
PARTS = """() => [...document.querySelectorAll('button, select, input, canvas, [role=button]')]
  .filter(each => each.tabIndex >= 0 && (each.type !== 'radio' || each.checked)).length"""


@pytest.mark.parametrize("make", made_up.HANDS, ids=lambda make: make.__name__)
def test_tab_reaches_every_part_which_has_a_name_and_is_seen_to_have_the_focus(
    make, alone
):
    page = alone(make())
    for part in range(page.evaluate(PARTS)):
        page.keyboard.press("Tab")
        assert page.evaluate(CALLED), f"part {part} has no name"
        assert (
            page.evaluate(
                "(window.visited ??= new Set()).add(document.activeElement).size"
            )
            == part + 1
        )
        drawn(page)
        with_focus = page.screenshot()
        page.evaluate("window.last = document.activeElement; window.last.blur()")
        drawn(page)
        assert page.screenshot() != with_focus, page.evaluate("window.last.outerHTML")
        page.evaluate("window.last.focus()")
