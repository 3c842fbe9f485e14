"""Ten MLPs 784-64w-32w-10 trained as one program against an honest loop over modules (batch 128, SGD, dropout 0.1).

Both see the same batches from the same initial weights; without dropout their losses must agree. Targets: in float32 at
least 4x faster at width x1, 1.5x at x4, never slower at x16; with precision="bfloat16", against the loop under bfloat16
autocast, at least 2.5x at x4 and 1.8x at x16. The step that is written out (training.steps.ChainStep) must be at least
1.3x faster than the same program by autograd, or it is not worth its lines. Exit status 1 if one is missed.
"""

import statistics
import sys
import warnings
from unittest import mock

import torch
import torch.nn.functional as F
from _timing import DEVICE, interleaved, report

from uqlab import ensembles, models, training

MEMBERS, BATCH, STEPS = 10, 128, 20
TARGETS = {
    ("float32", 1): 4.0,
    ("float32", 4): 1.5,
    ("float32", 16): 1.0,
    ("bfloat16", 4): 2.5,
    ("bfloat16", 16): 1.8,
}
REPEATS = {1: 25, 4: 15, 16: 9}

generator = torch.Generator().manual_seed(0)
inputs = torch.rand(BATCH * STEPS, 784, generator=generator).to(DEVICE)
labels = torch.randint(0, 10, (BATCH * STEPS,), generator=generator).to(DEVICE)


def make(width, dropout):
    return ensembles.deep(
        lambda: models.mlp(784, (64 * width, 32 * width), dropout=dropout), MEMBERS
    ).to(DEVICE)


def loop(nets, optimizers, bfloat16=False):
    """One epoch of every member, one after the other in each step; returns the mean loss of each."""
    totals = [0.0] * MEMBERS
    orders = []
    for m in range(MEMBERS):
        order = torch.Generator().manual_seed(ensembles.member_seed(0, m, "order", 0))
        orders.append(torch.randperm(len(inputs), generator=order).to(DEVICE))
    for step in range(STEPS):
        for m, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            rows = orders[m][step * BATCH : (step + 1) * BATCH]
            with torch.autocast(inputs.device.type, torch.bfloat16, enabled=bfloat16):
                loss = F.cross_entropy(net(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            totals[m] = totals[m] + loss.detach()
    return torch.stack(totals) / STEPS


def candidates(width, dropout=0.1):
    whole = make(width, dropout)
    nets = [[whole.member(m).train() for m in range(MEMBERS)] for _ in range(2)]
    optimizers = [
        [torch.optim.SGD(net.parameters(), 0.01, fused=True) for net in group]
        for group in nets
    ]

    def ours(precision):
        ensemble = make(width, dropout)
        settings = {
            "epochs": 1,
            "lr": 0.01,
            "batch_size": BATCH,
            "precision": precision,
            "progress": False,
        }
        return lambda: training.fit(ensemble, inputs, labels, **settings).loss[0]

    written_out = ours("float32")

    def by_autograd():
        with mock.patch("uqlab.training.steps.linear_chain", return_value=None):
            return written_out()

    own = [
        part.value.detach()
        for part in make(width, 0.0).modules()
        if isinstance(part, ensembles.Own)
    ]
    layers = [value for value in own if value.ndim == 3]
    sizes = [layers[0].shape[2], *(weight.shape[1] for weight in layers)]
    rows = [torch.rand(MEMBERS, BATCH, size, device=DEVICE) for size in sizes]

    def products():
        """The products of the steps and nothing else: no data, dropout, loss, biases or Python around them."""
        for _ in range(STEPS):
            for h, weight, out in zip(rows, layers, rows[1:], strict=False):
                torch.bmm(h, weight.mT, out=out)
            for i in reversed(range(len(layers))):
                if i:
                    torch.bmm(rows[i + 1], layers[i])
                layers[i].baddbmm_(rows[i + 1].mT, rows[i], beta=1, alpha=-1e-9)

    return {
        "products alone": products,
        "loop float32": lambda: loop(nets[0], optimizers[0]),
        "loop bfloat16": lambda: loop(nets[1], optimizers[1], bfloat16=True),
        "ours float32": ours("float32"),
        "ours bfloat16": ours("bfloat16"),
        "ours by autograd": by_autograd,
    }


def machine(size=1536):
    a, b = (
        torch.randn(size, size, device=DEVICE),
        torch.randn(size, size, device=DEVICE),
    )
    seconds = statistics.median(interleaved({"matmul": lambda: a @ b}, 7)["matmul"])
    return 2 * size**3 / seconds / 1e9


def main():
    warnings.filterwarnings(
        "ignore", "this processor"
    )  # said in the first line instead
    matrix_units = DEVICE != "cpu" or torch.cpu.get_capabilities().get(
        "amx_bf16", False
    )
    print(
        f"{torch.get_num_threads()} threads; bfloat16 matrix units: {'yes' if matrix_units else 'no, float32 products'}"
    )
    missed = []
    for width in (1, 4, 16):
        plain = candidates(width, dropout=0.0)
        torch.testing.assert_close(
            plain["ours float32"]().cpu(),
            plain["loop float32"]().cpu(),
            rtol=1e-4,
            atol=1e-5,
        )
        own = machine()
        print(f"\nwidth x{width}, {STEPS} steps a round; the same losses to 1e-4")
        seconds = interleaved(candidates(width), REPEATS[width])
        report(seconds, "loop float32")
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        # Two products forward and backward for the first layer, three for the others: no gradient of the input.
        flops = (
            2
            * MEMBERS
            * BATCH
            * STEPS
            * (2 * 784 * 64 * width + 3 * 64 * 32 * width**2 + 3 * 320 * width)
        )
        reached = flops / medians["ours float32"] / 1e9
        own = (own + machine()) / 2
        print(
            f"GFLOP/s: {reached:.0f} reached, {own:.0f} by this machine's own matmul: {100 * reached / own:.0f} %"
        )
        bound = flops / medians["products alone"] / 1e9
        share = f"{100 * bound / own:.0f} % of matmul's; the whole step reaches {reached / bound:.2f} of it"
        print(f"its products alone: {bound:.0f}, {share}")
        gain = medians["ours by autograd"] / medians["ours float32"]
        line = f"written out: {gain:.2f}x the step by autograd; target 1.3x {'met' if gain >= 1.3 else 'MISSED'}"
        missed += [line] if gain < 1.3 else []
        print(line)
        for precision in ("float32", "bfloat16"):
            speed = medians[f"loop {precision}"] / medians[f"ours {precision}"]
            line = f"{precision}: {speed:.2f}x the {precision} loop"
            if precision == "bfloat16":
                line += f" ({medians['loop float32'] / medians['ours bfloat16']:.2f}x the float32 loop)"
            if (target := TARGETS.get((precision, width))) is not None:
                line += f"; target {target}x {'met' if speed >= target else 'MISSED'}"
                missed += [line] if speed < target else []
            print(line)
    sys.exit(f"missed: {missed}" if missed else 0)


if __name__ == "__main__":
    main()
