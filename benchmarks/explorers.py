"""How soon explorers answer in headless Chromium, on two cores: a picture in 150 ms, 30 frames a second under the hand.

1. What painting ticks and labels once is worth: an explorer's picture against the same figure drawn anew, in turns.
2. Dragging a member of a cloud of 9 or 64: frames a second in which the bars moved, and the longest wait between two.
3. Each page's explorers, run at `tiny`: of one with a picture the milliseconds from the key press to the painted
   picture, median and quartiles over moves to pictures that were not drawn before; of one that asks its members the
   same to the answer. Names of pages as arguments choose some.
4. What a drawing's answer takes in the kernel with networks of the size that page 03's widest and page 04's have at
   `quick`: ten, and ten sub-models of one. Their weights do not matter here.
"""

import io
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from _timing import interleaved, report
from torch import nn

from uqlab import data, ensembles, extraction, models, plots, widgets
from uqlab.runs import parameters

sys.path.extend(str(Path(__file__).parents[1] / "tests" / room) for room in ("", "browser"))
import lab

MOVES, TARGET = 12, 150  # pictures for each page; milliseconds
FRAMES = 30  # a second, under the hand
# The hand moves once a frame, as browsers hand on a mouse's moves; resolves to the times of the frames.
DRAG = """seconds => new Promise(done => {
  const stage = document.querySelector('.stage'), place = stage.getBoundingClientRect(), times = [];
  const frame = now => {
    const angle = times.push(now) / 15;
    stage.dispatchEvent(new PointerEvent('pointermove', {
      clientX: place.x + place.width * (0.5 + 0.2 * Math.cos(angle)),
      clientY: place.y + place.height * (0.6 + 0.2 * Math.sin(angle)),
    }));
    now - times[0] > 1000 * seconds ? done(times) : requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})"""


def pages(names: list[str]) -> None:
    path = lab.chromium()
    if not path:
        print("no Chromium here: part 1 is left out")
        return
    folder = Path(tempfile.mkdtemp())
    notebooks = [parameters.find(name) for name in names] or parameters.all_notebooks()
    with lab.server(folder, root=folder) as address, lab.browser(path) as browser:
        for notebook in notebooks:
            page = lab.Lab(browser.new_page(viewport={"width": 1280, "height": 900}), address)
            page.open(lab.small_copy(notebook, folder))
            page.start()
            if errors := page.finish():
                raise RuntimeError(f"{notebook.stem}: {errors}")
            if page.page.evaluate(lab.SHOW, lab.EXPLORERS) >= 0 and page.page.locator(".uqlab-picture").count():
                page.show_explorer()
                told(notebook.stem, moves(page), TARGET)
            canvas = page.page.locator(".uqlab-hand:has(canvas)")
            if canvas.count():
                told(f"{notebook.stem}: drawing", answers(canvas), 100)
            page.shut_kernel()
            page.page.close()


def told(name: str, times: list[float], target: float) -> None:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    verdict = "" if middle <= target else f"  MISSES {target} ms"
    print(f"{name:40} {len(times):3} moves  {middle:4.0f} ms [{low:.0f}, {high:.0f}]{verdict}", flush=True)


def answers(explorer: Any) -> list[float]:
    """Milliseconds until the kernel's answers to blends of two images came."""
    explorer.scroll_into_view_if_needed()
    explorer.locator(".cell").first.wait_for()
    times = []
    for key in ["ArrowRight"] * 10 + ["ArrowLeft"] * 10:
        explorer.get_by_label("blend").press(key)
        time.sleep(0.25)
        times.append(float(explorer.locator(".seen").get_attribute("data-milliseconds")))
    return times


def frames() -> None:
    path = lab.chromium()
    if not path:
        return
    with lab.browser(path) as browser:
        for count in (9, 64):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            logits = 2 * torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
            page.set_content(widgets.cloud(logits, [m % 3 for m in range(count)]).html())
            dot = page.locator(".member .dot").last.bounding_box()
            page.mouse.move(dot["x"] + 8, dot["y"] + 8)
            page.mouse.down()
            before = page.locator(".bars [data-name=total]").get_attribute("data-value")
            seen = page.evaluate(DRAG, 4)
            page.mouse.up()
            assert page.locator(".bars [data-name=total]").get_attribute("data-value") != before
            rate, longest = (
                (len(seen) - 1) / (seen[-1] - seen[0]) * 1000,
                max(b - a for a, b in itertools.pairwise(seen)),
            )
            verdict = "" if rate >= FRAMES else f"  MISSES {FRAMES}"
            print(
                f"dragging one of {count:2} members: {rate:.0f} frames/s, longest wait {longest:.0f} ms{verdict}",
                flush=True,
            )
            page.close()


def moves(page: lab.Lab) -> list[float]:
    """Milliseconds of moves by the arrow keys, each to values that the explorer has not yet shown."""
    times: list[float] = []
    handles = page.page.locator(".uqlab-explorer .noUi-handle").all()
    selects = page.page.locator(".uqlab-explorer select").all()
    for handle in handles:
        low, now, high = (float(handle.get_attribute(f"aria-value{end}")) for end in ("min", "now", "max"))
        up, many = high - now >= now - low, high - low > 20  # of many places neighbours may show the same input
        key = f"Page{'Up' if up else 'Down'}" if many else f"Arrow{'Right' if up else 'Left'}"
        end = high if up else low
        handle.focus()
        for _ in range(max(1, MOVES // len(handles))):
            if float(handle.get_attribute("aria-valuenow")) == end:
                break
            times.append(page.move(lambda key=key: page.page.keyboard.press(key)))
            time.sleep(0.2)
    for select in selects:
        count = select.locator("option").count()
        at = select.evaluate("e => e.selectedIndex")
        for i in range(1, min(count, 4)):
            times.append(page.move(lambda s=select, to=(at + i) % count: s.select_option(index=to)))
            time.sleep(0.2)
    return times


def drawings() -> None:
    train = data.load("mnist-mini", "train")

    def wide() -> nn.Module:
        return models.mlp(784, (512, 256), 10)

    asked = {"ten networks": ensembles.deep(wide, 10, seed=0), "ten sub-models": extraction.masks(wide(), 10, seed=0)}
    hand = widgets.draw(asked, train, {"first": train.inputs[0]})
    for name in asked:
        times = []
        for _ in range(21):
            start = time.perf_counter()
            hand.answer({"model": name, "pixels": hand.data["examples"][0]})
            times.append(1000 * (time.perf_counter() - start))
        told(f"a drawing asked of {name}, width x8", times[1:], 100)


def once_or_whole() -> None:
    x, single = torch.linspace(-4, 4, 200), torch.randn(32, 200, generator=torch.Generator().manual_seed(0)).cumsum(1)
    sizes = (1, 2, 4, 8)
    means = {size: single.unflatten(0, (-1, size)).mean(1) for size in sizes}
    explorer, turn = widgets.collapse(x, means), itertools.count()

    def painted() -> None:
        explorer._shown.cache_clear()
        explorer.controls["size"].value = sizes[next(turn) % 4]

    def anew() -> bytes:
        size = sizes[next(turn) % 4]
        figure, (left, right) = plots.figure(2, height=2.6)
        left.plot(x, means[size].T, color=plots.EPISTEMIC, linewidth=0.9)
        for values in means.values():
            right.plot(x, values.var(0), color=plots.EPISTEMIC, alpha=0.2)
        right.plot(x, means[size].var(0), color=plots.EPISTEMIC)
        right.set_yscale("log")
        memory = io.BytesIO()
        figure.savefig(memory, format="png", dpi=200, pil_kwargs={"compress_level": 1})
        plt.close(figure)
        return memory.getvalue()

    report(interleaved({"ticks painted once": painted, "figure drawn anew": anew}, repeats=15), "figure drawn anew")


if __name__ == "__main__":
    plots.use_style()
    once_or_whole()
    drawings()
    frames()
    pages(sys.argv[1:])
