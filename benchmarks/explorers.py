"""How soon a moved slider shows a new picture, in JupyterLab in headless Chromium; target: 150 ms on two cores.

1. What painting ticks and labels once is worth: an explorer's picture against the same figure drawn anew, in turns.
2. Each page's explorer, run at `tiny`: milliseconds from the key press to the painted picture, median
   and quartiles over moves to pictures that were not drawn before. Names of pages as arguments choose some.
"""

import io
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from _timing import interleaved, report

from uqlab import plots, uncertainty, widgets
from uqlab.runs import parameters

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "browser"))
import lab

MOVES, TARGET = 12, 150  # pictures for each page; milliseconds


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
            page.show_explorer()
            times = sorted(moves(page))
            low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
            verdict = "" if middle <= TARGET else f"  MISSES {TARGET} ms"
            print(
                f"{notebook.stem:32} {len(times):3} moves  {middle:4.0f} ms [{low:.0f}, {high:.0f}]{verdict}",
                flush=True,
            )
            page.shut_kernel()
            page.page.close()


def moves(page: lab.Lab) -> list[float]:
    """Milliseconds of moves by the arrow keys, each to values that the explorer has not yet shown."""
    times: list[float] = []
    handles = page.page.locator(".uqlab-explorer .noUi-handle").all()
    selects = page.page.locator(".uqlab-explorer select").all()
    for handle in handles:
        low, now, high = (float(handle.get_attribute(f"aria-value{end}")) for end in ("min", "now", "max"))
        key, end = ("ArrowRight", high) if high - now >= now - low else ("ArrowLeft", low)
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


def once_or_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = {}
    for name, scale in (("digits", 1), ("letters", 3)):
        logits = scale * torch.randn(24, 540, 10, generator=generator).double()
        parts[name] = {m: uncertainty.decompose_groups(uncertainty.group_members(logits, m)) for m in (1, 2, 4, 8)}
    explorer, turn = widgets.groups(parts, 24), itertools.count()

    def painted() -> None:
        explorer._shown.cache_clear()
        explorer.controls["size"].value = (1, 2, 4, 8)[next(turn) % 4]

    def anew() -> bytes:
        size = (1, 2, 4, 8)[next(turn) % 4]
        figure, (left, right) = plots.figure(2, height=2.9)
        for name, by in parts.items():
            plots.ecdf(by[size].epistemic, color=plots.NEUTRAL, label=f"{name}, all members", ax=left)
            plots.ecdf(by[size].between, label=f"{name}, between", ax=left)
        left.set_xscale("symlog", linthresh=1e-3)
        means = [[getattr(by[size], kind).mean().item() for by in parts.values()] for kind in ("between", "within")]
        plots.stacked(list(parts), *means, ax=right).legend(loc="upper left")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        memory = io.BytesIO()
        figure.savefig(memory, format="png", dpi=200, pil_kwargs={"compress_level": 1})
        plt.close(figure)
        return memory.getvalue()

    report(interleaved({"ticks painted once": painted, "figure drawn anew": anew}, repeats=15), "figure drawn anew")


if __name__ == "__main__":
    plots.use_style()
    once_or_whole()
    pages(sys.argv[1:])
