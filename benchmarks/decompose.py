"""`uncertainty.decompose` on 10 x 1,000,000 x 10 float32 logits: time, peak memory, and error against plain float64.

Targets: at most 3 times one `torch.log_softmax` over the same tensor, and a peak of at most 2 times the input.
Exit status 1 if one is missed. Run: python benchmarks/decompose.py [--inputs N] [--repeats R] [--device cuda]
"""

import argparse
import subprocess
import sys

import torch
from _timing import DEVICE, interleaved, peak_memory, report

from uqlab.uncertainty import decompose

MEMBERS, CLASSES = 10, 10
MAX_TIME, MAX_MEMORY, MAX_ERROR = 3.0, 2.0, 2e-6


def make_logits(inputs: int) -> torch.Tensor:
    return (
        torch.randn(
            MEMBERS, inputs, CLASSES, generator=torch.Generator().manual_seed(0)
        )
        .mul_(3)
        .to(DEVICE)
    )


def memory_ratio(inputs: int) -> float:
    """Input plus what `decompose` adds to the peak, over the input; in a fresh process, whose peak is the input's."""
    logits = make_logits(inputs)
    decompose(logits[:, :10_000])  # libraries and threads load once
    before = peak_memory()
    decompose(logits)
    return 1 + (peak_memory() - before) / logits.nbytes


def reference(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Entropies written down as the definitions read, in float64."""
    p = logits.double().softmax(-1)
    total = torch.special.entr(p.mean(0)).sum(-1)
    aleatoric = torch.special.entr(p).sum(-1).mean(0)
    return total, aleatoric, total - aleatoric


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--memory-only",
        action="store_true",
        help="print the memory ratio (used in a fresh process)",
    )
    args = parser.parse_args()
    if args.memory_only:
        print(memory_ratio(args.inputs))
        return 0

    command = [
        sys.executable,
        __file__,
        "--device",
        DEVICE,
        "--memory-only",
        "--inputs",
        str(args.inputs),
    ]
    memory = float(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    logits = make_logits(args.inputs)
    print(
        f"logits {list(logits.shape)} float32, {logits.nbytes / 1e6:.0f} MB, {torch.get_num_threads()} threads"
    )
    functions = {
        "log_softmax": lambda: torch.log_softmax(logits, -1),
        "decompose": lambda: decompose(logits),
        "decompose, jackknife": lambda: decompose(logits, correct="jackknife"),
    }
    time = report(interleaved(functions, args.repeats), baseline="log_softmax")[
        "decompose"
    ]

    part = logits[:, :100_000]
    errors = [
        (a - b).abs().max().item()
        for a, b in zip(decompose(part), reference(part), strict=True)
    ]
    checks = {
        "time / log_softmax": (time, MAX_TIME),
        "peak memory / input": (memory, MAX_MEMORY),
        "largest error (nats)": (max(errors), MAX_ERROR),
    }
    for name, (value, limit) in checks.items():
        print(
            f"{name:<21} {value:10.3g}   at most {limit:g}   {'ok' if value <= limit else 'MISSED'}"
        )
    return int(any(value > limit for value, limit in checks.values()))


if __name__ == "__main__":
    sys.exit(main())
