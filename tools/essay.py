"""The essay "Ten networks that agree": docs/essay.html, one page that loads nothing.

    python tools/essay.py              writes the page, unless it is of today's sources
    python tools/essay.py --force      writes it in any case; about a minute on two cores
    python tools/essay.py --picture    films its first scene with Chromium: figures/gallery/essay.gif

The text is tools/essay.html, the figures that only the essay has are tools/essay.js, and the explorers are those of
`uqlab.widgets`: the same scripts, with the same data. The script trains the networks on embedded data and writes every
number of the text from what it computed or from committed tables. The page ends with the checksum of its sources, which
tests/test_docs.py holds.
"""

import hashlib
import io
import json
import math
import re
import shutil
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from scipy import stats
from torch import Tensor

from uqlab import data, ensembles, metrics, models, training, uncertainty, widgets
from uqlab.study import baselines
from uqlab.study.methods import METHODS
from uqlab.widgets.hands import CALM, COLORS, STATIC

ROOT = Path(__file__).resolve().parents[1]
ESSAY = ROOT / "docs" / "essay.html"
PICTURE = ROOT / "figures" / "gallery" / "essay.gif"
REAL = ROOT / "figures" / "real"
OBSERVATORY, SWEEP = REAL / "17_observatory", REAL / "03_mlp_width_sweep" / "table.csv"
EXPLORERS = "draw", "cloud", "alarm"
SEED, EPOCHS, MEMBERS, MANY = 0, 20, 10, 24
WIDTHS = 0.5, 1.0, 2.0, 4.0, 8.0
LONG = 32  # times the width, in the long runs
SIZES = 1, 2, 3, 4, 6, 8, 12  # members of a group; they divide MANY
PASSING = 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99
CHEAP = "lora", "singular_value", "masks", "hydra"
CHEAP_WIDTHS = [32, 64, 128, 192, 256]
UNKNOWN = {"clothes": "fashion-mini", "Kuzushiji": "kmnist-mini"}
LEVELS = np.linspace(0.05, 0.95, 19)
QUANTILES = [f"mi_q{round(100 * level):02d}" for level in LEVELS]

Sets = Mapping[str, Tensor]  # "id", "clothes", "letters"
Numbers = dict[str, str]


def hidden(width: float) -> tuple[int, int]:
    """Return the units of the two hidden layers."""
    return int(64 * width), int(32 * width)


def train(width: float, members: int, sets: Sets) -> tuple[Any, dict[str, Tensor]]:
    """Train networks of a width; return them and their logits [members, inputs, 10]."""
    digits = data.load("mnist-mini", "train")
    ensemble = ensembles.deep(
        lambda: models.mlp(784, hidden(width)), members=members, seed=SEED
    )
    how = {"epochs": EPOCHS, "lr": 0.05, "momentum": 0.9, "progress": False}
    training.fit(ensemble, digits.inputs, digits.labels, seed=SEED, **how)
    return ensemble, {
        key: training.predict(ensemble, inputs) for key, inputs in sets.items()
    }


def percent(share: float) -> str:
    """Return a share as the text has it."""
    return f"{math.floor(100 * share + 0.5)} %"  # as the scripts round


def points(share: float) -> str:
    """Return a difference of shares in points, without its sign."""
    return f"{abs(100 * share):.0f}"


def rings(values: Tensor, known: Tensor) -> float:
    """Return the share above the alarm that 95 % of the known inputs pass."""
    return (values > known.quantile(0.95)).double().mean().item()


def auroc(values: Mapping[str, Tensor], key: str = "clothes") -> float:
    """Return how well one score separates a set from the digits."""
    return metrics.ood_detection(values["id"], values[key]).auroc


# The scenes: data for the page, numbers for the text -------------------------------------------------------------------


def first_scene(ensemble: Any, logits: Sets, sets: Sets) -> tuple[dict, Numbers]:
    """Return the explorer to draw in, and how often ten networks agree."""
    digits = data.load("mnist-mini", "train")
    labels = data.load("mnist-mini").labels
    sure = votes(logits["id"])[1]
    rows = {
        f"a digit {label}": ("id", ((labels == label) & sure).nonzero()[4].item())
        for label in (3, 8)
    }
    for name, key in {"a letter": "letters", "a piece of clothing": "clothes"}.items():
        kinds, _ = votes(logits[key])
        confident = logits[key].softmax(-1).amax(-1).mean(0)
        found = kinds.double() + confident  # many answers, given with confidence
        rows[name] = key, found.argmax().item()
    examples = {name: sets[key][row] for name, (key, row) in rows.items()}
    hand = widgets.draw({"narrow": ensemble}, digits, examples, nearest=0)
    _, digits_agree = votes(logits["id"])
    _, letters_agree = votes(logits["letters"])
    confidence = logits["letters"].softmax(-1).amax(-1).mean().item()
    return hand.data, {
        "train": f"{len(digits):,}",
        "digits_unanimous": percent(digits_agree.double().mean().item()),
        "letters_unanimous": percent(letters_agree.double().mean().item()),
        "letters_confidence": percent(confidence),
    }


def votes(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many digits the members name for each input, and whether it is one."""
    named = logits.argmax(-1)
    kinds = (named[..., None] == torch.arange(10)).any(0).sum(-1)
    return kinds, kinds == 1


def two_situations() -> dict:
    """Return ten points that contradict each other, and ten that hesitate, with one mean."""
    camps = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    noise = torch.Generator().manual_seed(SEED)
    scatter = 0.5 * torch.randn(len(camps), 3, generator=noise, dtype=torch.float64)
    logits = 4 * torch.nn.functional.one_hot(camps, 3) + scatter
    contradict = logits.softmax(-1)
    mean = contradict.mean(0)
    spread = torch.randn(len(camps), 3, generator=noise, dtype=torch.float64)
    spread -= spread.mean(0)
    spread -= spread.mean(1, keepdim=True)
    hesitate = mean + 0.035 * spread
    assert hesitate.min() > 0
    assert torch.allclose(hesitate.mean(0), mean)
    made = widgets.cloud(contradict.log()).data
    situations = {
        "all are sure and contradict each other": contradict.tolist(),
        "all hesitate": hesitate.tolist(),
    }
    return {**made, "situations": situations}


def columns(parts: list[Mapping[str, Mapping[str, Tensor]]]) -> list[dict[str, list]]:
    """Return, for clothes and letters, the mean of each part at every setting."""
    return [
        {
            kind: [round(split[key][kind].mean().item(), 4) for split in parts]
            for kind in parts[0][key]
        }
        for key in ("clothes", "letters")
    ]


def alarm(values: Mapping[Any, Sets], sets: Sets, **how: Any) -> dict:
    """Return the data of an explorer of an alarm."""
    shown = {key: sets[key] for key in ("clothes", "letters")}
    return widgets.alarm(values, shown, {"id": "digits"}, **how).data


def committees(logits: Sets, sets: Sets) -> tuple[dict, Numbers]:
    """Return the alarm over groups of the small networks, and what stays within them."""
    splits = [
        {
            key: uncertainty.decompose_groups(uncertainty.group_members(z, size))
            for key, z in logits.items()
        }
        for size in SIZES
    ]
    between = {
        size: {key: split.between for key, split in by_set.items()}
        for size, by_set in zip(SIZES, splits, strict=True)
    }
    one, two, largest = between[1], between[2], between[SIZES[-1]]
    made = alarm(between, sets, what="group size")
    named = ("aleatoric", "within", "between")
    parts = [
        {
            key: {kind: getattr(split, kind) for kind in named}
            for key, split in by.items()
        }
        for by in splits
    ]
    epistemic = splits[0]["clothes"].epistemic.mean().item()
    return {**made, "stack": columns(parts)}, {
        "many": f"{MANY}",
        "largest_group": f"{SIZES[-1]}",
        "groups_clothes_one": percent(rings(one["clothes"], one["id"])),
        "groups_clothes_two": percent(rings(two["clothes"], one["id"])),
        "groups_sum": f"{epistemic:.2f}",
        "groups_share": percent(largest["clothes"].mean().item() / epistemic),
        "groups_auroc_one": f"{auroc(one):.3f}",
        "groups_auroc_twelve": f"{auroc(largest):.3f}",
    }


def wider(logits: Mapping[float, Sets], sets: Sets) -> tuple[dict, dict, Numbers]:
    """Return the alarm of the narrow networks, the one over widths, and what is lost."""
    splits = {
        width: {key: uncertainty.decompose(z) for key, z in by_set.items()}
        for width, by_set in logits.items()
    }
    values = {
        f"x{width:g}": {key: split.epistemic for key, split in by_set.items()}
        for width, by_set in splits.items()
    }
    narrow, *_, wide = values.values()
    first = alarm({"narrow": narrow}, sets, passing=PASSING)
    named = ("aleatoric", "epistemic")
    parts = [
        {
            key: {kind: getattr(split, kind) for kind in named}
            for key, split in by.items()
        }
        for by in splits.values()
    ]
    labels = data.load("mnist-mini").labels
    right = [metrics.accuracy(by["id"], labels) for by in logits.values()]
    ends = splits[WIDTHS[0]]["clothes"], splits[WIDTHS[-1]]["clothes"]
    total, aleatoric = (
        [getattr(split, kind).mean().item() for split in ends]
        for kind in ("total", "aleatoric")
    )
    share = (aleatoric[0] - aleatoric[1]) / (total[0] - total[1])
    assert right[-1] > right[0]
    assert share > 0.5
    long = pd.read_csv(SWEEP)
    return (
        first,
        {**alarm(values, sets), "stack": columns(parts)},
        {
            "alarm_clothes": percent(rings(narrow["clothes"], narrow["id"])),
            "alarm_letters": percent(rings(narrow["letters"], narrow["id"])),
            "wide_clothes": percent(rings(wide["clothes"], narrow["id"])),
            "anew_clothes": percent(rings(wide["clothes"], wide["id"])),
            "narrow": f"{WIDTHS[0]:g}",
            "wide": f"{WIDTHS[-1]:g}",
            "ratio": f"{WIDTHS[-1] / WIDTHS[0]:g}",
            "accuracy_narrow": f"{100 * right[0]:.1f} %",
            "accuracy_wide": f"{100 * right[-1]:.1f} %",
            "total_narrow": f"{total[0]:.2f}",
            "total_wide": f"{total[1]:.2f}",
            "aleatoric_share": percent(share),
            "auroc_narrow": f"{auroc(narrow):.3f}",
            "auroc_wide": f"{auroc(wide):.3f}",
            "long_seeds": f"{len(long)}",
            "long_ratio": f"{LONG}",
            "long_mi_narrow": f"{long['mi_ood_1'].mean():.3f}",
            "long_mi_wide": f"{long[f'mi_ood_{LONG}'].mean():.3f}",
        },
    )


@cache
def observed() -> pd.DataFrame:
    """Return the rows on networks of equal accuracy on letters, four blocks deep."""
    tables = [pd.read_csv(path) for path in sorted(OBSERVATORY.glob("*.csv"))]
    rows = pd.concat(tables, ignore_index=True)
    rows = rows[(rows["series"] == "accuracy") & (rows["layers"] == 4)]
    rows = rows[(rows["members"] == 8) & rows["width"].isin(CHEAP_WIDTHS)]
    one = (rows["note"] == "accuracy") & (rows["seed"] == 0)
    others = rows["note"].isin(["deeper", "pretraining", "sizes", "others"])
    rows = rows[one | others]
    return rows.drop_duplicates(["method", "set", "width", "seed"])


def of_all_widths(method: str, of: str) -> pd.DataFrame:
    """Return a method's rows on one set, of the seeds that have a network of each width."""
    rows = observed()
    rows = rows[(rows["method"] == method) & (rows["set"] == of)]
    widths = rows.groupby("seed")["width"].nunique()
    return rows[rows["seed"].isin(widths.index[widths == len(CHEAP_WIDTHS)])]


def share_above(method: str, of: str) -> pd.DataFrame:
    """Return the share of a set above the alarm of the narrowest network: [seed, width]."""
    known = of_all_widths(method, "mnist-mini")
    known = known[known["width"] == CHEAP_WIDTHS[0]].set_index("seed")["mi_q95"]
    rows = of_all_widths(method, of)
    share = [
        1 - np.interp(known[row["seed"]], row[QUANTILES].astype(float), LEVELS, 0, 1)
        for _, row in rows.iterrows()
    ]
    return rows.assign(share=share).pivot(index="seed", columns="width", values="share")


def in_points(interval: metrics.Interval) -> str:
    """Return a difference of shares with its interval, in points."""
    mean, low, high = (round(100 * value) for value in interval)
    return f"{mean:+d} points (95 %: {low:+d} to {high:+d})"


def equal_total(of: str) -> str:
    """Return the share of LoRA-Ensemble's MI that each doubling of the width takes away.

    Every ensemble has the temperature at which its mean total uncertainty is 1.5 nats.
    """
    rows = of_all_widths("lora", of)
    slopes = [
        np.polyfit(np.log(one["width"]), np.log(one["MI_at_1.5"]), 1)[0]
        for _, one in rows.groupby("seed")
    ]
    mean, _, high = metrics.paired_t(slopes)
    assert high < 0  # the text says so
    return percent(1 - 2**mean)


def cheap() -> tuple[dict, Numbers]:
    """Return what alarms of cheap ensembles catch at each width, and what is decided."""
    shares = {
        (method, name): share_above(method, of)
        for method in CHEAP
        for name, of in {"digits": "mnist-mini", **UNKNOWN}.items()
    }
    narrow, wide = CHEAP_WIDTHS[0], CHEAP_WIDTHS[-1]
    grown = {key: table[wide] - table[narrow] for key, table in shares.items()}
    unknown = [key for key in grown if key[1] != "digits"]
    p_values = [stats.ttest_1samp(grown[key], 0).pvalue for key in unknown]
    p = dict(zip(unknown, metrics.holm(p_values), strict=True))
    decided = [key for key in unknown if p[key] < 0.05]
    # The text says so.
    assert {method for method, _ in decided} == {"masks"}
    assert grown["lora", "clothes"].mean() > 0 > grown["lora", "Kuzushiji"].mean()
    seeds = {len(table) for table in shares.values()}
    assert len(seeds) == 1
    lines = []
    for method in CHEAP:
        right = of_all_widths(method, "mnist-mini").groupby("width")["accuracy"].mean()
        false = shares[method, "digits"].mean()
        lines.append([])
        for name in UNKNOWN:
            mean, key = shares[method, name].mean(), (method, name)
            verdict = "decided" if key in decided else "not decided"
            lines[-1].append(
                f"From width {narrow} to {wide} the alarm goes from {percent(mean[narrow])} to "
                f"{percent(mean[wide])} of {name}: {in_points(metrics.paired_t(grown[key]))}; corrected for "
                f"{len(unknown)} comparisons p = {p[key]:.2g}: {verdict}. On digits it goes from "
                f"{percent(false[narrow])} to {percent(false[wide])}. The ensemble is right on {percent(right[narrow])} and "
                f"{percent(right[wide])} of the digits."
            )
    page = {
        "colors": COLORS,
        "methods": [METHODS[method].label for method in CHEAP],
        "sets": [*UNKNOWN],
        "widths": CHEAP_WIDTHS,
        "shares": [
            [
                [
                    [round(float(x), 4) for x in metrics.paired_t(table[width])]
                    for width in table
                ]
                for table in (shares[method, name] for name in ("digits", *UNKNOWN))
            ]
            for method in CHEAP
        ],
        "lines": lines,
    }
    masks = of_all_widths("masks", "mnist-mini").groupby("width")["accuracy"].mean()
    few = observed()["train_limit"].unique()
    assert len(few) == 1
    return page, {
        "comparisons": spelled(len(unknown)),
        "decided": spelled(len(decided)),
        "networks": spelled(seeds.pop()),
        "few_digits": f"{few[0]}",
        "lora_clothes": points(grown["lora", "clothes"].mean()),
        "lora_kuzushiji": points(grown["lora", "Kuzushiji"].mean()),
        "masks_accuracy": percent(masks[narrow]),
        "masks_false": percent(shares["masks", "digits"].mean()[wide]),
        "lora_equal_clothes": equal_total("fashion-mini"),
        "lora_equal_kuzushiji": equal_total("kmnist-mini"),
    }


def spelled(count: int) -> str:
    """Return a small number as a word."""
    return ("none", "one", "two", "three", "four", "five", "six", "seven", "eight")[
        count
    ]


def compared(logits: Sets, sets: Sets) -> tuple[dict, Numbers]:
    """Return how well disagreement and two baselines separate the sets from digits."""
    digits = data.load("mnist-mini", "train")
    names = ["clothes", "letters"]
    others = {name: sets[name] for name in names}
    found = baselines.aurocs(digits.inputs, sets["id"], others, SEED)
    distance = [found[name]["Mahalanobis distance of pixels"] for name in names]
    split = {key: uncertainty.decompose(z) for key, z in logits.items()}
    mi = [auroc({key: x.epistemic for key, x in split.items()}, name) for name in names]
    one = {
        key: torch.special.entr(z.double().softmax(-1)).sum(-1)
        for key, z in logits.items()
    }
    entropy = []
    for name in names:
        each = [
            auroc({key: x[m] for key, x in one.items()}, name) for m in range(MEMBERS)
        ]
        entropy.append(float(np.mean(each)))
    assert distance[0] > max(mi[0], entropy[0])
    assert mi[1] > entropy[1] > distance[1]
    scores = [
        ("disagreement of ten networks", "epistemic", mi),
        ("entropy of one network (mean of ten)", "entropy", entropy),
        ("distance of the pixels, no network", "distance", distance),
    ]
    return {
        "colors": COLORS,
        "sets": names,
        "scores": [
            {"name": name, "kind": kind, "values": values}
            for name, kind, values in scores
        ],
    }, {
        "distance_clothes": f"{distance[0]:.3f}",
        "distance_letters": f"{distance[1]:.3f}",
        "mi_letters": f"{mi[1]:.3f}",
        "entropy_letters": f"{entropy[1]:.3f}",
    }


# The page --------------------------------------------------------------------------------------------------------------


def sources() -> list[Path]:
    """Return the files that the page follows from, the package's Python apart."""
    scripts = [ROOT / "uqlab" / "widgets" / "static" / f"{x}.js" for x in EXPLORERS]
    static = scripts[0].parent
    own = [Path(__file__).with_suffix(end) for end in (".py", ".html", ".js")]
    tables = [SWEEP, *sorted(OBSERVATORY.glob("*.csv"))]
    return [*own, *scripts, static / "shared.js", static / "hands.css", *tables]


def digest() -> str:
    """Return the checksum of all sources."""
    total = hashlib.sha256()
    for path in sources():
        total.update(f"{path.relative_to(ROOT).as_posix()}\n".encode())
        total.update(path.read_text("utf-8").encode())
    return total.hexdigest()


def module() -> str:
    """Return the scripts as one module, each explorer in its own scope."""
    parts = [(STATIC / "shared.js").read_text(), "const EXPLORERS = {"]
    for name in EXPLORERS:
        script = (STATIC / f"{name}.js").read_text()
        script = script.replace("export default { render };", "return { render };")
        parts.append(f"{name}: (() => {{\n{script}}})(),")
    return "\n".join([*parts, "};", Path(__file__).with_suffix(".js").read_text()])


def compute() -> tuple[dict[str, Any], Numbers]:
    """Train all networks; return the data of the scenes, and the numbers of the text."""
    sets = {
        "id": data.load("mnist-mini").inputs,
        "clothes": data.load("fashion-mini").inputs,
        "letters": data.load("letters").resize(28, 1).inputs,
    }
    logits = {}
    for width in WIDTHS[1:]:
        logits[width] = train(width, MEMBERS, sets)[1]
    many, all_logits = train(WIDTHS[0], MANY, sets)
    ten = ensembles.from_members([many.member(m) for m in range(MEMBERS)])
    first = {key: z[:MEMBERS] for key, z in all_logits.items()}
    logits = {WIDTHS[0]: first, **logits}
    page, numbers = {"cloud": two_situations()}, {}
    page["alarm"], page["wider"], found = wider(logits, sets)
    numbers |= found
    for name, (made, found) in {
        "draw": first_scene(ten, first, sets),
        "committees": committees(all_logits, sets),
        "cheap": cheap(),
        "baselines": compared(first, sets),
    }.items():
        page[name] = made
        numbers |= found
    numbers |= {f"n_{name}": f"{len(x):,}" for name, x in sets.items() if name != "id"}
    numbers |= {"n_digits": f"{len(sets['id']):,}", "seed": f"{SEED}"}
    numbers |= {"epochs": f"{EPOCHS}"}
    for end, width in {"narrow": WIDTHS[0], "wide": WIDTHS[-1]}.items():
        numbers[f"hidden_{end}"] = " and ".join(map(str, hidden(width)))
    return page, numbers


def write() -> None:
    """Compute and write the page."""
    page, numbers = compute()
    plain = json.dumps(page, allow_nan=False).replace("<", "\\u003c")
    text = Path(__file__).with_suffix(".html").read_text("utf-8")
    marks = {name: value.replace(" %", "\u00a0%") for name, value in numbers.items()}
    marks |= {"policy": CALM, "style": (STATIC / "hands.css").read_text()}
    marks |= {"data": plain, "module": module(), "sha256": digest()}
    whole = re.sub(r"\{\{(\w+)\}\}", lambda mark: marks[mark[1]], text)
    ESSAY.write_text(whole, "utf-8")
    print(f"{ESSAY.relative_to(ROOT)}, {ESSAY.stat().st_size / 1e6:.1f} MB")


THREE = [
    (0.32, 0.28),
    (0.42, 0.2),
    (0.58, 0.22),
    (0.64, 0.33),
    (0.58, 0.44),
    (0.46, 0.49),
]
THREE += [(0.6, 0.53), (0.67, 0.65), (0.6, 0.78), (0.44, 0.81), (0.32, 0.73)]
SCRIBBLE = [
    (0.25, 0.3),
    (0.75, 0.25),
    (0.3, 0.75),
    (0.72, 0.7),
    (0.5, 0.15),
    (0.2, 0.6),
]


def film() -> None:
    """Draw a digit and a scribble in the page with Chromium, and write that as a GIF."""
    from playwright.sync_api import sync_playwright

    frames: list[tuple[Image.Image, int]] = []  # with its time in milliseconds
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        how = {"executable_path": path, "args": ["--no-sandbox", "--disable-gpu"]}
        browser = playwright.chromium.launch(**how)
        page = browser.new_page(viewport={"width": 700, "height": 500})
        page.goto(ESSAY.as_uri())
        page.locator("body[data-ready]").wait_for(state="attached")
        canvas = page.locator("#draw canvas")
        place = canvas.bounding_box()
        assert place

        def keep(milliseconds: int) -> None:
            page.wait_for_timeout(60)  # two frames are drawn
            image = Image.open(io.BytesIO(page.screenshot()))
            frames.append((image.convert("RGB"), milliseconds))

        def move(x: float, y: float, steps: int = 6) -> None:
            x, y = place["x"] + x * place["width"], place["y"] + y * place["height"]
            page.mouse.move(x, y, steps=steps)

        for stroke in (THREE, SCRIBBLE):
            page.get_by_role("button", name="clear").click()
            keep(500)
            move(*stroke[0])
            page.mouse.down()
            for point in stroke[1:]:
                move(*point)
                keep(150)
            page.mouse.up()
            frames[-1] = frames[-1][0], 2500
        browser.close()
    palette = frames[-1][0].quantize(64, Image.Quantize.MAXCOVERAGE)
    images = [image.quantize(palette=palette, dither=0) for image, _ in frames]
    times = [milliseconds for _, milliseconds in frames]
    how = {"save_all": True, "append_images": images[1:], "duration": times, "loop": 0}
    images[0].save(PICTURE, optimize=True, **how)
    print(f"{PICTURE.relative_to(ROOT)}, {PICTURE.stat().st_size / 1e6:.2f} MB")


def main(options: list[str]) -> None:
    """Write the page where that is needed, and the picture on request."""
    old = ESSAY.read_text("utf-8") if ESSAY.exists() else ""
    if "--force" in options or f"<!-- sha256 {digest()} -->" not in old:
        write()
    if "--picture" in options:
        film()


if __name__ == "__main__":
    main(sys.argv[1:])
