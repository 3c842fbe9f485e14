"""Pages with their parameters changed: each to values that its comment allows, or just beside them.

A page runs, or one clear sentence refuses in its first seconds. Several changes are tried at once; where such a run
does not end well, its halves are tried, down to single changes.
"""

import json
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from uqlab import data, runs
from uqlab.runs import parameters
from uqlab.runs.parameters import MAY_BE_EMPTY, RULES

SECONDS, AT_ONCE = 20, 16  # for a refusal; changes in one run
Change = tuple[str, Any]

# What cannot be changed here: needs files that are fetched, is set by the runner, or is the page's own runner.
LEFT = (
    "output_dir",
    "backbone",
    "checkpoint",
    "input_mean",
    "input_std",
    "weights",
    "root",
    "sweep",
    "page",
    "grid",
)
# Pages that take texts too, and what a parameter of text may be besides data sets; what is told apart by page.
TEXTS = ("06", "07", "08", "10", "11", "13")
VALUES: dict[str, Any] = {
    "batch_size": [9], "limit": [0, 40, 1], "device": ["cpu"], "model": ["small-cnn", "mlp"],
    "prompt": ["{}", "this is a {}"], "ablations": ["", "nowhere.csv"], "board": ["", "nowhere.csv"],
    "study": ["", "nowhere.csv"], "methods": [[], ["single"], ["deep", "single", "masksembles"]],
    "scores": [["entropy"], ["mi", "msp", "entropy"]], "own": [{"lora": {"epochs": 2}}],
    "settings": [{"epochs": 2}], "quality": ["accuracy"], "cost": ["stored"], "by": ["members"],
    "replicate": ["seed"], "series": ["auroc_mi"], "shown": ["what it is"], "over": ["x"],
    "rivals": [[], ["auroc_entropy", "auroc_mi"]], "page_profile": ["tiny"], "seeds": [[3, 1], [0, 1, 2]],
    "unknown": ["textures"], "chosen_on": ["textures"], "near": [[]],
    "gradients": [["exgrad"], ["gradnorm", "exgrad"], []], "sound": {"dataset": ["spoken-digits[4-6]"], "ood": [["everyday-sounds[0-4]"]]},
}  # fmt: skip


def other(value: Any, rule: Any, comment: str) -> list:
    """Values of one number or choice besides the page's own, at the edge and inside of what the rule allows."""
    if rule is bool:
        return [not value]
    if isinstance(rule, tuple):
        return [
            each for each in rule if each != value and each != "umap"
        ]  # umap is not installed with uqlab
    if type(value) is int and not isinstance(rule, str):
        least = rule if isinstance(rule, int) else 0
        whole = [0] if "0 = all" in comment or "0: all" in comment else [least]
        return [each for each in dict.fromkeys([*whole, value + 1]) if each != value]
    more = [value * 0.5, value * 1.5] if value else [0.1]
    return [int(each) for each in more] if isinstance(value, int) else more


def values(name: str, default: Any, page: str, comment: str, files: Path) -> list:
    """What a parameter of a page is changed to; `default` is its value at `tiny`."""
    rule = RULES[name]
    own = f"{files}/own.npz"
    if page == "15" and name in ("dataset", "ood"):
        return VALUES["sound"][name]
    if name == "dataset":
        return (
            ["digits[0,1]", "fashion-mini[3,6]", own, f"{files}/own.tsv", ""]
            if page != "14"
            else ["captions[0-11]"]
        )
    if name == "ambiguous":
        return ["", own]
    if name == "pretrained":
        return [["digits", "letters", "glyphs"], default[::-1]]
    if name == "ood":
        return [
            ["kmnist-mini"],
            ["glyphs", own, "letters[0-4]"],
            default[::-1],
            ["textures", "textures"],
            [],
        ]
    if name == "trained":
        return [f"{files}/trained"]
    if name in VALUES:
        return VALUES[name]
    if isinstance(rule, list):
        items = [
            *default,
            *(x for each in default for x in other(each, rule[0], comment)),
        ]
        items = list(dict.fromkeys(items)) or [3]
        empty = [[]] if name in MAY_BE_EMPTY else []
        return [
            default[:1] or items[:1],
            sorted(items)[:3],
            sorted(items, reverse=True)[:3],
            default[::-1],
            *empty,
        ]
    return other(default, rule, comment)


def changes(path: Path, files: Path) -> list[Change]:
    """All changes of a page, in the order in which its parameters stand."""
    source = "".join(
        "".join(c["source"])
        for c in parameters.cells(path)
        if "parameters" in c["metadata"].get("tags", [])
    )
    comments = dict(re.findall(r"^(\w+) = .*?  # (.+)$", source, re.MULTILINE))
    known = parameters.defaults(path) | parameters.overrides(path, "tiny")
    return [
        (name, value)
        for name, default in known.items()
        if name not in LEFT
        for value in values(name, default, path.stem[:2], comments[name], files)
        if value != default and type(value) is type(default)
    ]


def own_files(folder: Path) -> None:
    """A user's own images, of three classes, and own sentences."""
    some = data.load("digits[0-2]", "train", limit=150)
    np.savez(folder / "own.npz", x=some.inputs.numpy(), y=some.labels.numpy())
    rows = [
        f"a {w} film, number {i}\t{i % 2}" for i, w in enumerate(["dull", "fine"] * 60)
    ]
    (folder / "own.tsv").write_text("\n".join(["sentence\tlabel", *rows]))


def refusal(failed: Path) -> str:
    """How a page died: "" where it, or the package, refused in words; else what was raised, and where."""
    cells = json.loads(next(failed.glob("*.ipynb")).read_text())["cells"]
    error = next(
        o for c in cells for o in c.get("outputs", []) if o["output_type"] == "error"
    )
    trace = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error["traceback"]))
    said = f"{error['ename']}: {error['evalue'][:150]}"
    places = re.findall(r"^(?:File |Cell )\S.*$", trace, re.MULTILINE)
    raised = re.findall(r"^-+> *\d+ (.*)$", trace, re.MULTILINE)
    ours = "/uqlab/" in places[-1] or (
        places[-1].startswith("Cell") and raised[-1].lstrip().startswith("raise ")
    )
    in_words = (
        error["ename"] in ("ValueError", "TypeError", "FileNotFoundError")
        and len(error["evalue"].split()) > 3
    )
    return "" if ours and in_words else f"{said} at {places[-1]} {raised[-1].strip()}"


def tried(path: Path, group: list[Change], folder: Path) -> Iterator[str]:
    """Run a page with changes; where it does not run, with fewer."""
    place, started = folder / f"{path.stem}-{time.monotonic_ns()}", time.monotonic()
    try:
        runs.execute(path, dict(group), profile="tiny", folder=place, threads=1)
        yield from ["page ran"] * len(group)
    except (ValueError, runs.RunError) as error:
        seconds = time.monotonic() - started
        if len(group) > 1:
            half = len(group) // 2
            yield from tried(path, group[:half], folder)
            yield from tried(path, group[half:], folder)
            return
        name, value = group[0]
        what = f"{path.stem[:2]} {name}={str(value)[:60]}"
        said = (
            refusal(Path(f"{place}.failed")) if isinstance(error, runs.RunError) else ""
        )
        late = f"refused after {seconds:.0f} s" if seconds > SECONDS else ""
        yield f"FAULT {what}: {said or late}" if said or late else "page refused"
        print(f"  {what}: {seconds:.0f} s: {str(error)[:160]}", flush=True)
    finally:
        for left in folder.glob(f"{place.name}*"):
            shutil.rmtree(left, ignore_errors=True)


def groups(path: Path, files: Path) -> list[list[Change]]:
    """All changes of a page, none twice in one group; what is likely refused is alone, and texts come together."""
    made: list[list[Change]] = []
    found, bold, texts = changes(path, files), [], f"{files}/own.tsv"
    for name, value in found:
        if name in ("dataset", "limit", "ood") and value in ("", [], 1, texts):
            bold.append([(name, value)])
            continue
        place = next(
            (g for g in made if len(g) < AT_ONCE and name not in dict(g)), None
        )
        made.append(place := []) if place is None else None
        place.append((name, value))
    if path.stem[:2] in TEXTS:
        kinds = {
            "dataset": texts,
            "ood": [texts],
            "near": [texts],
            "unknown": texts,
            "chosen_on": texts,
        }
        kinds["pretrained"] = [texts] * 3
        made.append(
            [(name, value) for name, value in kinds.items() if name in dict(found)]
        )
    return [*made, *bold]


def pages(number: int, rng: random.Random) -> Iterator[str]:
    """So many pages, all of them with 17."""
    with tempfile.TemporaryDirectory() as place:
        own_files(Path(place))
        for path in rng.sample(parameters.all_notebooks(), number):
            for group in groups(path, Path(place)):
                yield from tried(path, group, Path(place))
