"""Sixteen members of implicit ensembles on a vision transformer of width 192, 6 layers, 28 x 28 images (50 tokens).

LoRA-Ensemble (rank 8), singular value ensemble and BatchEnsemble against 16 separate plain models, which do strictly
less arithmetic; LoRA against torch.func.vmap over stacked LoRA modules that each hold the frozen weight, as in the
published implementation; the singular value layer's choice against either of its two ways to multiply. Targets: LoRA
forward at least 2.5x faster than separate models at batch 1, within 1.25x of their time at batch 16 and 64, and never
slower than vmap; the singular value layer within 10 % of the better way. Exit status 1 if one is missed.

    python benchmarks/implicit_ensembles.py [REPEATS]
"""

import copy
import statistics
import sys

import torch
import torch.nn.functional as F
from _timing import interleaved, report
from torch import nn

from uqlab import adapters, ensembles, models

MEMBERS, RANK = 16, 8
REPEATS = int(sys.argv[1]) if len(sys.argv) > 1 else 5


def backbone():
    return models.vit(28, 4, width=192, layers=6, heads=6)


class SeparateLoRA(nn.Module):
    """The published way: LoRA modules of the members, stacked, called through vmap; each holds the frozen weight."""

    def __init__(self, layer: adapters.LoRALinear):
        super().__init__()
        copies = [layer.shard(slice(m, m + 1)).requires_grad_(True) for m in range(layer.members)]
        self.members = layer.members
        plain = [
            nn.ParameterDict(
                {
                    "w": c.weight.detach().clone(),
                    "b": c.bias.detach().clone(),
                    "down": c.down[0].detach().clone(),
                    "up": c.up[0].detach().clone(),
                }
            )
            for c in copies
        ]
        stacked = {name: torch.stack([p[name].detach() for p in plain]) for name in plain[0]}
        self.stacked = nn.ParameterDict(stacked)
        for name in ("w", "b"):
            self.stacked[name].requires_grad_(False)

    def forward(self, x):
        def one(w, b, down, up, rows):
            return F.linear(rows, w, b) + F.linear(F.linear(rows, down), up)

        p = self.stacked
        y = torch.func.vmap(one)(p["w"], p["b"], p["down"], p["up"], x.unflatten(0, (self.members, -1)))
        return y.flatten(0, 1)


def vmapped(lora):
    """The same ensemble with vmapped modules in place of ours; returns a function x -> logits."""
    network = copy.deepcopy(lora.network)
    for name, part in list(network.named_modules()):
        if isinstance(part, adapters.LoRALinear):
            parent, _, child = name.rpartition(".")
            setattr(network.get_submodule(parent), child, SeparateLoRA(part))
    network.eval()

    def call(x):
        logits = network(x.repeat(MEMBERS, 1, 1, 1))
        return getattr(logits, "logits", logits).unflatten(0, (MEMBERS, -1))

    return call, network


def bytes_of(*modules):
    tensors = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for module in modules
        for t in (*module.parameters(), *module.buffers())
    }
    return sum(tensors.values())


def passes(model, x, backward):
    labels = torch.arange(len(x)) % 10

    def forward():
        with torch.no_grad():
            return model(x)

    def both():
        logits = model(x)
        F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(logits))).backward()

    return both if backward else forward


def separate_models(plain):
    """Sixteen models one after the other, each with its own backward pass when there is one."""

    def run(x, backward):
        labels = torch.arange(len(x)) % 10
        for model in plain:
            if backward:
                F.cross_entropy(model(x), labels).backward()
            else:
                with torch.no_grad():
                    model(x)

    return run


def in_parts(ensemble, x):
    """Forward and backward as a training step takes them: pass by pass."""
    labels = torch.arange(len(x)) % 10
    many = x.expand(MEMBERS, *x.shape)
    for rows, part in ensemble.parts(many):
        logits = part(many[rows])
        F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(logits))).backward()


def main():
    missed = []
    torch.manual_seed(0)
    base = backbone().eval()
    plain = [backbone().eval() for _ in range(MEMBERS)]
    made = {
        "lora": ensembles.lora(base, MEMBERS, RANK).eval(),
        "singular values": ensembles.singular_value(base, MEMBERS).eval(),
        "batch ensemble": ensembles.batch(base, MEMBERS).eval(),
    }
    with torch.no_grad():  # away from B = 0, so that agreement says something
        for part in made["lora"].modules():
            if isinstance(part, adapters.LoRALinear):
                part.up.normal_(0, 0.02)
    stacked, stacked_network = vmapped(made["lora"])
    x = torch.rand(2, 1, 28, 28)
    assert torch.allclose(stacked(x), made["lora"](x), atol=1e-4)
    own = {name: sum(p.numel() for p in e.parameters() if p.requires_grad) for name, e in made.items()}
    size = sum(p.numel() for p in base.parameters())
    print(
        f"parameters of the backbone {size:,}; of the members' own " + ", ".join(f"{n} {c:,}" for n, c in own.items())
    )
    sizes = {"16 separate": bytes_of(*plain), "vmap": bytes_of(stacked_network)} | {
        n: bytes_of(e) for n, e in made.items()
    }
    print("weights in memory, MB: " + ", ".join(f"{name} {count / 1e6:.1f}" for name, count in sizes.items()))

    run_separate = separate_models(plain)
    for backward in (False, True):
        for batch in (1, 16, 64):
            x = torch.rand(batch, 1, 28, 28)
            repeats = max(3, REPEATS if batch > 1 else 3 * REPEATS)
            candidates = {"16 separate": lambda x=x, b=backward: run_separate(x, b)}
            for name, ensemble in made.items():
                candidates[name] = (
                    passes(ensemble, x, False) if not backward else lambda e=ensemble, x=x: in_parts(e, x)
                )
            candidates["vmap"] = passes(stacked, x, backward)
            chosen = made["lora"].members_per_pass(x.expand(MEMBERS, *x.shape))
            what = "forward and backward" if backward else "forward"
            print(f"\nbatch {batch}, {what}; LoRA takes {chosen} members per pass")
            seconds = interleaved(candidates, repeats)
            ratios = report(seconds, "16 separate")
            limit = 1 / 2.5 if batch == 1 and not backward else 1.25
            against_vmap = statistics.median(seconds["lora"]) / statistics.median(seconds["vmap"])
            if ratios["lora"] > limit:
                missed.append(f"batch {batch}, {what}: LoRA {ratios['lora']:.2f} > {limit:.2f} of separate models")
            if against_vmap > 1:
                missed.append(f"batch {batch}, {what}: LoRA {against_vmap:.2f} of vmap")
    singular_values(made["singular values"], missed)
    if missed:
        sys.exit("targets missed: " + "; ".join(missed))


def singular_values(ensemble, missed):
    """The choice between two products a row and every member's weight, against either."""
    choose = adapters.SVDLinear.factored
    for backward in (False, True):
        for batch in (1, 8, 64):
            x = torch.rand(batch, 1, 28, 28)
            run = passes(ensemble, x, False) if not backward else lambda x=x: in_parts(ensemble, x)

            def forced(answer, run=run):
                def call():
                    adapters.SVDLinear.factored = choose if answer is None else lambda self, rows: answer
                    run()
                    adapters.SVDLinear.factored = choose

                return call

            print(f"\nsingular values, batch {batch}, {'forward and backward' if backward else 'forward'}")
            candidates = {"chosen": forced(None), "factored": forced(True), "built": forced(False)}
            ratios = report(interleaved(candidates, max(3, REPEATS)), "chosen")
            if min(ratios["factored"], ratios["built"]) < 1 / 1.1:
                missed.append(f"singular values, batch {batch}, backward {backward}: the other way is faster {ratios}")


if __name__ == "__main__":
    main()
