"""How soon explorers answer in headless Chromium, on two cores: 30 frames a second under the hand.

1. What painting ticks and labels once is worth: an explorer's pictures against the same figures drawn anew, in turns.
2. Dragging in each explorer that answers the hand, its data of the size that pages have at `quick`: frames a second,
   and the longest wait between two. A drawing is answered in each frame by networks of page 03's greatest width.
3. With `--pictures`, and nothing else: how many pictures each page's explorer has with the data of `quick`, how long
   they take and how large they are. Runs the pages; names of pages as arguments choose some.
"""

import contextlib
import gc
import io
import itertools
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import nbformat
import torch
from _timing import interleaved, report

from uqlab import data, ensembles, models, plots, widgets
from uqlab.runs import parameters
from uqlab.study.methods import METHODS

sys.path.extend(
    str(Path(__file__).parents[1] / "tests" / room) for room in ("", "browser")
)
import lab
import made_up

EXPLORER = re.compile(r"(?<![\w.])widgets\.\w+\(")
FRAMES = 30  # a second, under the hand
# The hand moves once a frame, as browsers hand on a mouse's moves: a pointer, or the knob of a slider. Resolves to the
# times of the frames and the number of different sights, of which one in thirty frames is looked at.
DRAG = """([what, seconds]) => new Promise(done => {
  const on = document.querySelector(what), hand = on.closest('.uqlab-hand'), times = [], sights = new Set();
  const place = on.getBoundingClientRect();
  const frame = now => {
    const turn = times.push(now) / 15;
    if (on.type === 'range') {
      on.value = on.max * (0.5 + 0.5 * Math.sin(turn));
      on.dispatchEvent(new Event('input'));
    } else {
      const [x, y] = [0.5 + 0.2 * Math.cos(turn), 0.6 + 0.2 * Math.sin(turn)];
      const at = { clientX: place.x + place.width * x, clientY: place.y + place.height * y };
      on.dispatchEvent(new PointerEvent('pointermove', at));
    }
    if (times.length % 30 === 0) sights.add(hand.innerHTML + hand.querySelector('canvas')?.toDataURL());
    now - times[0] > 1000 * seconds ? done([times, sights.size]) : requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})"""
CANVAS = ".uqlab-hand canvas"


def hands() -> dict[str, tuple[widgets.Hand, str, str]]:
    """Name -> an explorer as large as a page's at `quick`, what is pressed, and what moves ("" presses nothing)."""
    random = torch.Generator().manual_seed(0)
    triangle, knob, images = (
        ".stage svg",
        "input[type=range]",
        torch.rand(40, 1, 28, 28, generator=random),
    )
    found = {}
    for count in (9, 64):
        logits = 2 * torch.randn(count, 3, generator=random)
        cloud = widgets.cloud(logits, [m % 3 for m in range(count)])
        found[f"cloud of {count} members"] = (
            cloud,
            f".member:nth-child({count}) .dot",
            triangle,
        )
    kinds = ("id", "clothes", "letters")
    values = {
        w: {kind: torch.randn(2000, generator=random).exp() / w for kind in kinds}
        for w in (1, 2, 4, 8, 16)
    }
    found["alarm, sets of 2,000"] = (
        widgets.alarm(values, dict.fromkeys(kinds[1:], images)),
        "",
        knob,
    )
    board = made_up.board(tuple(METHODS), seeds=5)
    asked = ["nll", "accuracy"], ["stored", "latency_64"]
    found[f"front of {len(METHODS)} methods"] = (
        widgets.front({"quick": board}, "nll", *asked),
        "",
        knob,
    )
    features = {
        name: torch.randn(4, 8, 13, 200, 16, generator=random)
        for name in ("id", "far", "near")
    }
    found["map of 4 x 8 heads"] = widgets.head_map(
        torch.rand(4, 8, generator=random), [(i // 8, i % 8) for i in range(12)],
        lambda gone, layer, head, name: features[name][layer, head, gone], known="id", others=["far", "near"],
        removed=range(13), path={"accuracy": torch.rand(13, generator=random).tolist()},
    ), "", knob  # fmt: skip
    found["108 pictures"] = pictured(), "", knob
    train = data.load("mnist-mini", "train")
    wide = ensembles.deep(lambda: models.mlp(784, (512, 256), 10), 10, seed=0)
    found["drawing, answered by wide networks"] = (
        widgets.draw({"wide": wide}, train, {"first": train.inputs[0]}),
        CANVAS,
        CANVAS,
    )
    return found


def pictured() -> widgets.Hand:
    """An explorer with about as many pictures as those of pages."""
    figure, ax = plots.figure(1, width=6.8, height=2.6)
    ax.set(xlim=(0, 11), ylim=(0, 9))

    def draw(count: int, slope: int) -> None:
        ax.plot(range(count), [slope] * count)

    controls = {"count": range(12), "slope": range(9)}
    return widgets.explore(draw, controls, "A line.", figure)


def frames() -> None:
    path = lab.chromium()
    if not path:
        return
    with lab.browser(path) as browser:
        for name, (hand, pressed, moved) in hands().items():
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_content(hand.html())
            drag(name, page, pressed, moved)
            page.close()


def drag(name: str, page: Any, pressed: str, moved: str) -> None:
    """Press, let it move for seconds, and print how many frames there were."""
    if pressed:
        place = page.locator(pressed).first.bounding_box()
        page.mouse.move(
            place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
        )
        page.mouse.down()
    times, sights = page.evaluate(DRAG, [moved, 4])
    page.mouse.up()
    assert sights > 1, f"{name}: nothing moved"
    rate, longest = (
        (len(times) - 1) / (times[-1] - times[0]) * 1000,
        max(b - a for a, b in itertools.pairwise(times)),
    )
    verdict = "" if rate >= FRAMES else f"  MISSES {FRAMES}"
    print(
        f"{name:40} {rate:3.0f} frames/s, longest wait {longest:.0f} ms{verdict}",
        flush=True,
    )


def pictures(notebook: Path) -> None:
    """Run the page to its last explorer, and print what the cells with explorers took."""
    cells = [
        cell for cell in nbformat.read(notebook, 4).cells if cell.cell_type == "code"
    ]
    names: dict[str, Any] = {"__name__": notebook.stem}
    earlier, last = frames_of(()), 0
    for i, cell in enumerate(cells):
        last = i if EXPLORER.search(cell.source) else last
    times = []
    with (
        contextlib.redirect_stdout(io.StringIO()),
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(notebook.parent),
    ):
        for cell in cells[: last + 1]:
            start = time.process_time()  # what other processes do does not count
            exec(compile(cell.source, notebook.stem, "exec"), names)
            if EXPLORER.search(cell.source):
                times.append(time.process_time() - start)
            if "parameters" in cell.metadata.get("tags", []):
                names["output_dir"] = folder
    plt.close("all")
    for hand in frames_of(earlier):
        shown, different = len(hand.data["shown"]), len(hand.data["pictures"])
        size = sum(map(len, hand.data["pictures"])) / 1e6
        print(
            f"{notebook.stem:30} {shown} combinations, {different} pictures of {size:.1f} MB; "
            f"its cell {times[-1]:.1f} s",
            flush=True,
        )


def frames_of(earlier: Any) -> list[widgets.Hand]:
    """Return the explorers of pictures that are alive now and were not earlier."""
    alive = [each for each in gc.get_objects() if widgets.Hand in type(each).__mro__]
    return [each for each in alive if each.name == "frames" and each not in earlier]


def once_or_whole() -> None:
    x, single = (
        torch.linspace(-4, 4, 200),
        torch.randn(32, 200, generator=torch.Generator().manual_seed(0)).cumsum(1),
    )
    sizes = (1, 2, 4, 8)
    means = {size: single.unflatten(0, (-1, size)).mean(1) for size in sizes}

    def anew() -> None:
        for size in sizes:
            figure, (left, right) = plots.figure(2, height=2.6)
            left.plot(x, means[size].T, color=plots.EPISTEMIC, linewidth=0.9)
            for values in means.values():
                right.plot(x, values.var(0), color=plots.EPISTEMIC, alpha=0.2)
            right.plot(x, means[size].var(0), color=plots.EPISTEMIC)
            right.set_yscale("log")
            figure.savefig(io.BytesIO(), format="webp", dpi=137.5)
            plt.close(figure)

    report(
        interleaved(
            {
                "ticks painted once": lambda: widgets.collapse(x, means, bool),
                "figures drawn anew": anew,
            },
            repeats=15,
        ),
        "figures drawn anew",
    )


if __name__ == "__main__":
    plots.use_style()
    options, chosen = [
        [name for name in sys.argv[1:] if (name == "--pictures") == option]
        for option in (True, False)
    ]
    notebooks = [parameters.find(name) for name in chosen] or parameters.all_notebooks()
    if options:
        for notebook in notebooks:
            pictures(notebook)
    else:
        once_or_whole()
        frames()
