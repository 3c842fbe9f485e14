"""What the tests of explorers in a browser read from them and do to them."""

import torch

from uqlab import uncertainty


def drawn(place) -> None:
    """Wait until a page, or the page of a part of it, has drawn two frames: what is done is seen after the next one."""
    place.evaluate(
        "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )


def bars(page) -> dict[str, float]:
    drawn(page.locator(".bars").first)
    return {bar.get_attribute("data-name"): float(bar.get_attribute("data-value"))
            for bar in page.locator(".bars [data-name]").all()}  # fmt: skip


def middle(explorer, m: int) -> tuple[float, float]:
    """Where a member is on the screen, whatever lies upon it."""
    dot = explorer.locator(".member .dot").nth(m).bounding_box()
    return dot["x"] + dot["width"] / 2, dot["y"] + dot["height"] / 2


def drag(explorer, m: int, to, steps: int = 3) -> None:
    """Drag a member to a place of the triangle's drawing."""
    stage = explorer.locator(".stage svg")
    stage.scroll_into_view_if_needed()
    place, zoom = stage.bounding_box(), stage.bounding_box()["width"] / 340
    mouse = stage.page.mouse
    mouse.move(*middle(stage, m))
    mouse.down()
    mouse.move(place["x"] + to[0] * zoom, place["y"] + to[1] * zoom, steps=steps)
    mouse.up()


def decomposed(state: dict) -> dict[str, float]:
    """What the package makes of a cloud's members and groups."""
    p = torch.tensor(state["members"], dtype=torch.float64)
    order = torch.tensor(state["groups"] or range(len(p))).argsort(stable=True)
    groups = len({*(state["groups"] or range(len(p)))})
    logits = p[order].clamp_min(1e-300).log().view(groups, -1, 1, 3)
    part = uncertainty.decompose_groups(
        logits, "jackknife" if state["jackknife"] else None
    )
    return {
        name: getattr(part, name).item()
        for name in ("total", "aleatoric", "epistemic", "between", "within")
    }
