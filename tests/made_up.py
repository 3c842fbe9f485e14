"""One explorer of every kind, on small made-up results: the page that most browser tests open."""

import pandas as pd
import torch

from uqlab import data, ensembles, models, plots, uncertainty, widgets

plots.use_style()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def decomposed(members: int, scale: float, seed: int) -> uncertainty.Decomposition:
    return uncertainty.decompose(scale * normal(members, 30, 4, seed=seed))


def collapse() -> widgets.Hand:
    single = normal(8, 40).cumsum(1)
    return widgets.collapse(
        torch.linspace(-1, 1, 40),
        {size: single.unflatten(0, (-1, size)).mean(1) for size in (1, 2, 4)},
        lambda ax: ax.axhline(0),
    )


def masks() -> widgets.Hand:
    found = {
        w: {
            f"layer {k}": normal(5, 12, seed=k + int(w)).sigmoid().float()
            for k in (1, 2)
        }
        for w in (0.0, 2.0)
    }
    views = [(w, cut) for w in found for cut in (None, 0.5)]
    parts = {
        view: {
            kind: decomposed(5, 1 + i, i + k) for k, kind in enumerate(("id", "ood"))
        }
        for i, view in enumerate(views)
    }
    trained = {kind: decomposed(5, 2, 9) for kind in ("id", "ood")}
    return widgets.masks(found, parts, dict.fromkeys(views, 0.9), trained, weight=2.0)


def spectra() -> widgets.Hand:
    before = {"q": normal(12, 12), "v": normal(12, 12, seed=1)}
    updates = torch.stack([9 * torch.outer(*normal(2, 12, seed=m)) for m in (2, 3)])
    after = {
        "LoRA": lambda name: before[name] + updates,
        "full": lambda name: before[name] + 0.1 * normal(2, 12, 12, seed=4),
    }
    return widgets.spectra(before, after, k=4, threshold=0.9)


def explore() -> widgets.Hand:
    figure, ax = plots.figure(1, width=4.0, height=2.0)
    ax.set(xlim=(0, 1), ylim=(0, 5))
    controls = {
        "size": widgets.Control("size", [1, 2, 3, 4], 1),
        "dashed": widgets.Control("line", [("solid", False), ("dashed", True)]),
        "color": widgets.Control("colour", ["black", "red"]),
    }

    def draw(size: int, dashed: bool, color: str) -> None:
        ax.plot([0, 1], [0, size], "--" if dashed else "-", color=color)

    return widgets.explore(
        draw, controls, lambda size, **_: f"A made-up line that ends at {size}.", figure
    )


def cloud(count: int = 5, groups: list[int] | None = None) -> widgets.Hand:
    return widgets.cloud(2 * normal(count, 3), groups)


def alarm() -> widgets.Hand:
    kinds = ("id", "letters", "<b>mine</b>")
    values = {
        w: {k: (normal(30, seed=i) + i).exp() / w for i, k in enumerate(kinds)}
        for w in (0.5, 8.0)
    }
    return widgets.alarm(
        values,
        {kind: normal(30, 1, 8, 8).sigmoid() for kind in kinds[1:]},
        {"id": "digits"},
    )


def board(
    methods: tuple[str, ...] = ("single", "deep", "lora", "batch", "mine"),
    seeds: int = 4,
) -> pd.DataFrame:
    rows = [
        {"method": method, "seed": seed} for method in methods for seed in range(seeds)
    ]
    numbers = normal(3, len(rows)).exp().numpy()
    return pd.DataFrame(rows).assign(
        nll=numbers[0],
        accuracy=numbers[1],
        stored=1e4 * numbers[2],
        latency_64=numbers[0],
    )


def front() -> widgets.Hand:
    boards = {"made up": board(), "other": board(("single", "deep", "tiles"))}
    return widgets.front(
        boards,
        "nll",
        ["nll", "accuracy"],
        ["stored", "latency_64"],
        {"stored": "stored numbers"},
    )


def head_map() -> widgets.Hand:
    order = [(1, 0), (0, 1), (0, 0), (1, 1)]
    clouds = {
        name: normal(2, 2, 3, 30, 5, seed=i) + i
        for i, name in enumerate(("test", "far", "near"))
    }
    return widgets.head_map(
        normal(2, 2), order, lambda gone, layer, head, name: clouds[name][layer, head, gone], known="test",
        others=["far", "near"], removed=range(3), path={"accuracy": [0.9, 0.8, 0.7], "AUROC": [0.6, 0.5, 0.4]},
        alone={pair: {"accuracy": 0.85, "AUROC": 0.55} for pair in order},
    )  # fmt: skip


def networks() -> tuple[dict[str, torch.nn.Module], data.Dataset]:
    train = data.load("digits", "train", limit=40)
    make = {name: ensembles.deep(lambda h=hidden: models.mlp(64, (h,)), 3, seed=0)
            for name, hidden in (("narrow", 4), ("wide", 32))}  # fmt: skip
    return make, train


def draw() -> widgets.Hand:
    made, train = networks()
    return widgets.draw(
        made, train, {f"digit {i}": train.inputs[i] for i in range(3)}, what="width"
    )


def guess() -> widgets.Hand:
    return widgets.guess(
        "By how much does the *accuracy* change?",
        *(0, 10, "points"),
        answer=1.2,
        then="Hardly. **The order** stays.\n\nThe `scale` <b>falls</b>.",
    )


PICTURES = (collapse, masks, explore)
HANDS = (*PICTURES, spectra, cloud, alarm, front, head_map, draw, guess)
