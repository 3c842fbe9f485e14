"""Choices that are measured (`uqlab.core.tuning`) against every way forced: the chosen one is at most 1.05 of the best.

What is chosen is found anew, in an empty cache folder. A forced way is taken by every layer, or pass, that offers it;
the others take their rules of thumb. Medians of interleaved rounds, without gradients. Exit status 1 if a choice is
slower than 1.05 of the best way; it is then measured and chosen once more, and must fail twice.

    python benchmarks/choices.py [CASE ...] [--repeats R] [--device cuda]
"""

import argparse
import copy
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _timing import DEVICE, interleaved

from uqlab import gradients, heads, models
from uqlab.core import tuning

LIMIT = 1.05


def transformer(width: int = 192) -> Any:
    torch.manual_seed(0)
    return models.vit(28, 4, width=width, layers=6, heads=6).eval()


def fused(kept: str) -> Any:
    model, pairs = (
        transformer(96),
        [(layer, head) for layer in range(6) for head in range(6)],
    )
    even = [
        [(layer, (layer + m + i) % 6) for layer in range(6) for i in (0, 3)]
        for m in range(3)
    ]
    sets = even if kept == "even" else heads.sample_heads(pairs, len(pairs) // 3, 3)
    return heads.fuse([heads.prune(model, each) for each in sets])


def of_ensemble(make: Callable[[], Any]) -> Callable[[int], Callable[[], object]]:
    """Made for a batch: an ensemble of its own, so that nothing chosen before is known to it."""

    def prepared(batch: int) -> Callable[[], object]:
        ensemble, x = (
            copy.deepcopy(make()).eval().to(DEVICE),
            torch.rand(batch, 1, 28, 28).to(DEVICE),
        )

        def call() -> None:
            with torch.no_grad():
                ensemble(x)

        return call

    return prepared


def of_gradients(
    make: Callable[[], Any], weight: str
) -> Callable[[int], Callable[[], object]]:
    def prepared(batch: int) -> Callable[[], object]:
        model, x = make().to(DEVICE), torch.rand(batch, 1, 28, 28).to(DEVICE)
        return lambda: gradients.regrad(model, x, class_weight=weight, perturbations=0)  # type: ignore[arg-type]

    return prepared


def small_cnn() -> Any:
    torch.manual_seed(0)
    return models.small_cnn().eval()


BATCHES = (1, 16, 64)
CASES: dict[str, tuple[Callable[[int], Callable], tuple[int, ...]]] = {
    "three fused ViTs of width 96": (of_ensemble(lambda: fused("even")), BATCHES),
    "three fused ViTs of width 96, uneven": (
        of_ensemble(lambda: fused("uneven")),
        BATCHES,
    ),
    "gradient norms, ViT of width 96": (
        of_gradients(lambda: transformer(96), "sqrt_p"),
        (16,),
    ),
    "gradient norms, small CNN": (of_gradients(small_cnn, "sqrt_p"), (32,)),
    "gradient norms of the top class, small CNN": (
        of_gradients(small_cnn, "predicted"),
        (32,),
    ),
}


def forcing(
    call: Callable[[], object], kind: str | None, way: str
) -> Callable[[], object]:
    """The call with one way taken wherever that kind of choice offers it, and rules elsewhere; None: the choices."""

    def choose(
        asked: str, shape: Any, like: Any, ways: Any, rule: str, work: Any = None
    ) -> str:
        return way if asked == kind and way in ways else rule

    def forced() -> None:
        with mock.patch.object(tuning, "choose", choose):
            call()

    return forced if kind else call


def offered(call: Callable[[], object]) -> dict[str, list[str]]:
    """The choices that a call makes, and their ways."""
    found: dict[str, list[str]] = {}

    def choose(
        asked: str, shape: Any, like: Any, ways: Any, rule: str, work: Any = None
    ) -> str:
        found.setdefault(asked, [])
        found[asked] += [way for way in ways if way not in found[asked]]
        return rule

    with mock.patch.object(tuning, "choose", choose):
        call()
    return found


def known(path: Path) -> Any:
    """The file of choices is this one."""
    return mock.patch.object(tuning, "choices", return_value=path)


def measured(name: str, batch: int) -> tuple[dict[str, float], float]:
    """Median seconds of the choices and of every way, starred if it was chosen; seconds of the first call."""
    prepare, _ = CASES[name]
    ways = {
        f"{kind}: {way}": (kind, way)
        for kind, each in offered(prepare(batch)).items()
        for way in each
    }
    chosen = prepare(batch)
    tuning._FOUND.clear()
    with tempfile.TemporaryDirectory() as folder, known(Path(folder, "c.json")):
        [first] = interleaved({"first": chosen}, 1, warmup=0)["first"]
        turns = {"chosen": chosen}
        turns |= {label: forcing(prepare(batch), *way) for label, way in ways.items()}
        for call in turns.values():
            call()
        once = statistics.median(interleaved({"chosen": turns["chosen"]}, 3)["chosen"])
        found = {f"{key[0]}: {way}" for key, way in tuning._FOUND.items()}
        turns = {
            f"{label}{'*' * (label in found)}": call for label, call in turns.items()
        }
        seconds = interleaved(turns, max(OPTIONS.repeats, min(60, int(0.3 / once))))
    return {label: statistics.median(times) for label, times in seconds.items()}, first


def main() -> int:
    missed = []
    print(f"{torch.get_num_threads()} threads, {DEVICE}, torch {torch.__version__}")
    print(
        "| work | batch | chosen, ms | first call, ms | chosen / best way | ways, of the chosen's time; * chosen |"
    )
    print("|---|---:|---:|---:|---:|---|")
    for name, (_, batches) in CASES.items():
        if OPTIONS.case and not any(part in name for part in OPTIONS.case):
            continue
        for batch in batches:
            for again in (True, False):
                medians, first = measured(name, batch)
                chosen = medians.pop("chosen")
                ratio = chosen / min(medians.values(), default=chosen)
                if ratio <= LIMIT or not again:
                    break
            shown = {
                re.sub(" of .* in a pass", " in a pass", label): s
                for label, s in medians.items()
            }
            short = ", ".join(
                f"{label} {seconds / chosen:.2f}" for label, seconds in shown.items()
            )
            print(
                f"| {name} | {batch} | {1e3 * chosen:.2f} | {1e3 * first:.0f} | {ratio:.2f} | {short} |",
                flush=True,
            )
            missed += [f"{name}, batch {batch}: {ratio:.2f}"] if ratio > LIMIT else []
    if missed:
        print(f"chosen form slower than {LIMIT} of the best: " + "; ".join(missed))
    return int(bool(missed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", nargs="*", help="parts of names of cases; none: all")
    parser.add_argument("--repeats", type=int, default=9)
    OPTIONS = parser.parse_args()
    os.environ.pop(tuning.TUNE, None)
    sys.exit(main())
