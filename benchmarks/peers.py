"""The same work by other packages' public functions and by ours: interleaved medians, and whether the numbers agree.

The peers are torch-uncertainty, probly and laplace-torch. One that cannot be
imported is skipped, and the reason is printed. What a peer is given is prepared outside the clock: its axes, NumPy
arrays, weights equal to ours. Where its numbers deviate by definition, a note below the table says so.
Exit status 1 if numbers do not agree. There is no target for time: the ratios are printed as they are.

They need an environment of their own, without constraints.txt:

    python -m venv .peers
    .peers/bin/pip install torch==2.13.0 torch-uncertainty laplace-torch probly
    .peers/bin/pip install -e '.[notebooks]'
    .peers/bin/python benchmarks/peers.py [WORK ...] [--repeats R]        WORK: parts of the names of rows
"""

import argparse
import importlib
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _timing import DEVICE, interleaved
from torch import Tensor, nn

from uqlab import ensembles, metrics, models, training, uncertainty
from uqlab.ensembles.laplace import classifier_curvature, curvatures

MEMBERS, INPUTS, CLASSES, BATCH, STEPS = 10, 1_000_000, 10, 128, 20


class Row(NamedTuple):
    """A piece of work: each package's way to do it, and the largest difference of numbers with its tolerance."""

    work: str
    ways: dict[str, Callable[[], Any]]  # "uqlab" and the peers
    agreement: Callable[
        [], dict[str, tuple[float, float]]
    ]  # a peer's name: (difference, at most)
    note: str = ""


def peer(name: str, *parts: str) -> Any:
    """A peer's modules, or None with a line that says why; torch-uncertainty imports lightning, which warns."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            modules = [importlib.import_module(part) for part in parts]
    except Exception as error:
        print(
            f"skipped: {name}, which cannot be imported here ({type(error).__name__}: {error})"
        )
        return None
    return modules if len(modules) > 1 else modules[0]


def difference(a: Any, b: Any) -> float:
    return (
        (torch.as_tensor(a).cpu().double() - torch.as_tensor(b).cpu().double())
        .abs()
        .max()
        .item()
    )


def compared(
    ways: dict[str, Callable],
    at_most: float,
    of: Callable[[Any], Any] = lambda found: found,
) -> Callable:
    """Every peer's result against ours."""

    def call() -> dict[str, tuple[float, float]]:
        ours = of(ways["uqlab"]())
        return {
            name: (difference(ours, of(way())), at_most)
            for name, way in ways.items()
            if name != "uqlab"
        }

    return call


def log_probabilities(members: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(members, INPUTS, CLASSES, generator=generator)
        .mul_(3)
        .log_softmax(-1)
        .to(DEVICE)
    )


def measures() -> Iterator[Row]:
    logits = log_probabilities(MEMBERS)
    p = (
        logits.exp().transpose(0, 1).contiguous()
    )  # both peers: [inputs, members, classes]
    ways: dict[str, Callable] = {
        "uqlab": lambda: uncertainty.decompose(logits).epistemic
    }
    if TU:
        ways["torch-uncertainty"] = lambda: once(
            TU.metrics.MutualInformation(reduction="none"), p
        )
    if PROBLY:
        ways["probly"] = lambda: PROBLY.mutual_information(
            p.cpu().numpy(), base=torch.e
        )
    note = (
        "torch-uncertainty: negative values become 0; ours also gives the two entropies"
    )
    yield Row(
        "mutual information, 10 x 1,000,000 x 10", ways, compared(ways, 2e-6), note
    )
    del logits, p
    logits = log_probabilities(1)
    labels = torch.multinomial(
        logits[0].exp().cpu(), 1, generator=torch.Generator().manual_seed(0)
    )[:, 0].to(DEVICE)
    p, score = logits[0].exp(), -logits[0].amax(-1)
    ways = {"uqlab": lambda: metrics.ece(logits, labels)}
    if TU:
        settings = {"task": "multiclass", "num_bins": 15, "num_classes": CLASSES}
        ways["torch-uncertainty"] = lambda: once(
            TU.metrics.CalibrationError(**settings), p, labels
        )
    if PROBLY:
        ways["probly"] = lambda: PROBLY_ECE(p.cpu().numpy(), labels.cpu().numpy(), 15)
    note = "torch-uncertainty adds a million float32 numbers up, ours float64; that is its difference"
    yield Row("ECE of 15 bins, 1,000,000 inputs", ways, compared(ways, 2e-5), note)
    ways = {"uqlab": lambda: metrics.aurc(logits, labels, score)}
    if TU:
        ways["torch-uncertainty"] = lambda: once(TU.metrics.AURC(), p, labels)
    note = "torch-uncertainty: trapezoids from coverage 1/n on, over 1 - 1/n; ours the mean over coverages (Geifman 2019)"
    yield Row("AURC, 1,000,000 inputs", ways, compared(ways, 1e-5), note)


def once(metric: Any, *given: Tensor) -> Any:
    metric.update(*given)
    return metric.compute()


def deep(dropout: float = 0.0) -> Any:
    return ensembles.deep(
        lambda: models.mlp(784, (256, 128), dropout=dropout), MEMBERS
    ).to(DEVICE)


def with_weights_of(ensemble: Any, members: Any) -> Any:
    for m, member in enumerate(members):
        member.load_state_dict(ensemble.member(m).state_dict())
    return members


def deep_ensembles() -> Iterator[Row]:
    """Each with the batches of ours: a member's order is a function of (seed, member)."""
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.rand(BATCH * STEPS, 784, generator=generator),
        torch.arange(BATCH * STEPS) % CLASSES,
    )
    x, y = x.to(DEVICE), y.to(DEVICE)

    def base() -> nn.Module:
        return models.mlp(784, (256, 128), dropout=0.0).to(DEVICE)

    def loop(members: Any) -> Callable:
        optimizer = torch.optim.SGD(members.parameters(), 0.01, fused=True)

        def epoch() -> Tensor:
            seeds = [ensembles.member_seed(0, m, "order", 0) for m in range(MEMBERS)]
            orders = [
                torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
                for seed in seeds
            ]
            losses = torch.zeros(MEMBERS, device=DEVICE)
            for step in zip(*(order.split(BATCH) for order in orders), strict=True):
                each = [
                    F.cross_entropy(member(x[rows]), y[rows])
                    for member, rows in zip(members, step, strict=True)
                ]
                optimizer.zero_grad()
                torch.stack(each).sum().backward()
                optimizer.step()
                losses += torch.stack(each).detach() / STEPS
            return losses

        return epoch

    def made() -> dict[str, Callable]:
        ours, how = (
            deep(),
            {"epochs": 1, "lr": 0.01, "batch_size": BATCH, "progress": False},
        )
        ways: dict[str, Callable] = {
            "uqlab": lambda: training.fit(ours, x, y, **how).loss[0]
        }
        if TU:
            theirs = TU.methods.deep_ensembles([ours.member(m) for m in range(MEMBERS)])
            ways["torch-uncertainty"] = loop(theirs.core_models.train())
        if PROBLY:
            theirs = PROBLY_ENSEMBLE(base(), MEMBERS)
            ways["probly"] = loop(with_weights_of(ours, theirs.models))
        return ways

    note = "peers have no loop of their own that takes an order per member: all their members under one optimizer"
    yield Row(
        "training ten MLPs 784-256-128-10, 20 steps of 128",
        made(),
        compared(made(), 1e-4),
        note,
    )
    for batch in (1, 128):
        ours, some = deep().eval(), x[:batch]
        ways: dict[str, Callable] = {"uqlab": quiet(ours, some)}
        if TU:
            theirs = TU.methods.deep_ensembles(
                [ours.member(m) for m in range(MEMBERS)]
            ).eval()
            ways["torch-uncertainty"] = quiet(
                lambda z, m=theirs: m(z).unflatten(0, (MEMBERS, -1)), some
            )
        if PROBLY:
            theirs = PROBLY_ENSEMBLE(base(), MEMBERS).eval()
            with_weights_of(ours, theirs.models)
            ways["probly"] = quiet(
                lambda z, m=theirs: m.predict_representation(z, logits=True).transpose(
                    0, 1
                ),
                some,
            )
        yield Row(f"the ten MLPs asked, batch {batch}", ways, compared(ways, 1e-5))


def quiet(model: Callable, x: Tensor) -> Callable:
    def call() -> Tensor:
        with torch.no_grad():
            return model(x)

    return call


def mc_dropout() -> Iterator[Row]:
    """Masks are random: mean probabilities must agree as means of samples do, by their own standard errors."""
    torch.manual_seed(0)
    members, x, network = (
        256,
        torch.rand(128, 784, device=DEVICE),
        models.mlp(784, (256, 128), dropout=0.2).eval().to(DEVICE),
    )
    ensemble = ensembles.dropout(network, members, 0.2)
    ways: dict[str, Callable] = {
        "uqlab": quiet(lambda z: ensemble.resample(next(SEEDS))(z), x)
    }
    if TU:
        theirs = (
            TU.methods.mc_dropout(models.mlp(784, (256, 128), dropout=0.2), members)
            .eval()
            .to(DEVICE)
        )
        theirs.core_model.load_state_dict(network.state_dict())
        ways["torch-uncertainty"] = quiet(
            lambda z: theirs(z).unflatten(0, (members, -1)), x
        )

    def agreement() -> dict[str, tuple[float, float]]:
        found = {name: way().softmax(-1) for name, way in ways.items()}
        ours = found.pop("uqlab")
        apart = {}
        for name, p in found.items():
            error = ((ours.var(0) + p.var(0)) / members).sqrt()
            apart[name] = (
                ((ours.mean(0) - p.mean(0)) / error).square().mean().sqrt().item(),
                1.5,
            )
        return apart

    note = "a member of ours drops the same units for all inputs, one of the peer others; difference in standard errors"
    yield Row("MC dropout, 256 members, batch 128", ways, agreement, note)


def packed() -> Iterator[Row]:
    members, widths = 4, (256, 128)
    ensemble: Any = (
        ensembles.packed(models.mlp(784, widths, dropout=0.0), members, 2.0)
        .eval()
        .to(DEVICE)
    )
    # weight, bias, weight, ...
    own = [part.kind.value for part in ensemble.seen.values()]
    theirs: Any = None
    if TU:
        theirs = (
            TU.models.mlp.packed_mlp(784, CLASSES, list(widths), members, alpha=2.0)
            .eval()
            .to(DEVICE)
        )
        with torch.no_grad():
            layers = [*theirs.layers, theirs.final_layer]
            for weight, bias, layer in zip(own[::2], own[1::2], layers, strict=True):
                layer.weight.copy_(weight.reshape(layer.weight.shape))
                layer.bias.copy_(bias.flatten())
    y = torch.arange(128, device=DEVICE) % CLASSES
    for batch in (1, 128):
        x = torch.rand(batch, 784, device=DEVICE)
        each: dict[str, Callable] = {"uqlab": ensemble}
        if theirs:
            each["torch-uncertainty"] = lambda z: theirs(z).unflatten(0, (members, -1))
        ways = {name: quiet(model, x) for name, model in each.items()}
        yield Row(
            f"Packed-Ensembles of 4, alpha 2, 784-256-128-10, batch {batch}",
            ways,
            compared(ways, 1e-5),
        )
    x = torch.rand(128, 784, device=DEVICE)

    def both(model: Callable) -> Callable:
        def call() -> Tensor:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.repeat(members))
            loss.backward()
            return loss.detach()

        return call

    ways = {name: both(model) for name, model in each.items()}
    yield Row("the same, forward and backward, batch 128", ways, compared(ways, 1e-5))


class Adapted(nn.Module):
    """The plain form of a LoRA layer with one member, for laplace-torch."""

    def __init__(self, layer: nn.Linear, low: Any):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(*p.data[0].T.shape, bias=False) for p in (low.lora_A, low.lora_B)
        )
        self.down.weight = nn.Parameter(low.lora_A.data[0].clone())
        self.up.weight = nn.Parameter(low.lora_B.data[0].clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def laplace() -> Iterator[Row]:
    torch.manual_seed(0)
    x, y = (
        torch.rand(1000, 784, device=DEVICE),
        torch.arange(1000, device=DEVICE) % CLASSES,
    )
    backbone = nn.Sequential(
        nn.Linear(784, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )
    lora: Any = ensembles.lora(backbone, 1, 4, classifiers="shared").eval().to(DEVICE)
    lows = {name: part.kind for name, part in lora.seen.items()}
    for low in lows.values():
        nn.init.normal_(low.lora_B, std=0.02)
    ways: dict[str, Callable] = {
        "uqlab": lambda: ensembles.laplace_lora(lora, x, MEMBERS, prior_variance=1e-3)
    }
    if LAPLACE:
        plain = nn.Sequential(
            *[
                Adapted(part, lows[name]) if (name := f"{i}.weight") in lows else part
                for i, part in enumerate(lora.network)
            ]
        )
        plain[-1].requires_grad_(False)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 64)

        def theirs() -> Any:
            how = {
                "subset_of_weights": "all",
                "hessian_structure": "kron",
                "prior_precision": 1e3,
            }
            made = LAPLACE.Laplace(plain, "classification", **how)
            made.fit(loader)
            made.sample(MEMBERS)
            return made

        ways["laplace-torch"] = theirs

    def agreement() -> dict[str, tuple[float, float]]:
        if "laplace-torch" not in ways:
            return {}
        found, apart = theirs().H_facs.kfacs, 0.0
        ours = [factors for pair in curvatures(lora, x).values() for factors in pair]
        for own, other in zip(ours, found, strict=True):
            for a, b in zip(own, other, strict=True):
                apart = max(apart, difference(a, b) / a.abs().max().item())
        return {"laplace-torch": (apart, 1e-5)}

    note = "Kronecker factors of A and B compared; ours in float64"
    yield Row("Laplace-LoRA, rank 4, 1,000 inputs, ten draws", ways, agreement, note)


def last_layer() -> Iterator[Row]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    net = net.eval().to(DEVICE)
    x = torch.rand(1000, 784, device=DEVICE)
    y = torch.arange(1000, device=DEVICE) % CLASSES
    ways: dict[str, Callable] = {"uqlab": lambda: ensembles.laplace(net, x, MEMBERS)}
    if LAPLACE:
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 64)

        def theirs() -> Any:
            how = {"subset_of_weights": "last_layer", "hessian_structure": "kron"}
            made = LAPLACE.Laplace(net, "classification", **how)
            made.fit(loader)
            made.optimize_prior_precision(method="marglik", n_steps=100, lr=0.1)
            made.sample(MEMBERS)
            return made

        ways["laplace-torch"] = theirs

    def agreement() -> dict[str, tuple[float, float]]:
        if "laplace-torch" not in ways:
            return {}
        ours = classifier_curvature(net, "2", x, 64, None)
        outputs, inputs = theirs().H_facs.kfacs[0]  # those of the weight
        apart = [
            difference(a, b) / a.abs().max().item()
            for a, b in ((ours.outputs, outputs), (ours.inputs[:-1, :-1], inputs))
        ]
        return {"laplace-torch": (max(apart), 1e-5)}

    note = "Kronecker factors of the weight compared; laplace-torch takes weight and bias for independent, and finds the prior by 100 steps"
    yield Row(
        "last-layer Laplace, 1,000 inputs, prior by the evidence, ten draws",
        ways,
        agreement,
        note,
    )


def main() -> int:
    missed = []
    print(
        f"medians of {OPTIONS.repeats} interleaved rounds, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(
        "| work | uqlab, ms | peer | its time, ms | uqlab / peer | largest difference of numbers |"
    )
    print("|---|---:|---|---:|---:|---:|")
    notes = []
    for row in (
        row
        for make in (measures, deep_ensembles, mc_dropout, packed, laplace, last_layer)
        for row in make()
    ):
        if OPTIONS.work and not any(part in row.work for part in OPTIONS.work):
            continue
        apart = row.agreement()
        medians = {
            name: statistics.median(times)
            for name, times in interleaved(row.ways, OPTIONS.repeats).items()
        }
        for name in apart:
            ours, theirs, (found, most) = medians["uqlab"], medians[name], apart[name]
            print(
                f"| {row.work} | {1e3 * ours:.2f} | {name} | {1e3 * theirs:.2f} | {ours / theirs:.2f} | {found:.1e} |"
            )
            missed += (
                [f"{row.work}: {name} is {found:.2g} apart, at most {most:g}"]
                if not found <= most
                else []
            )
        notes += [f"- {row.work}: {row.note}."] * bool(row.note)
        sys.stdout.flush()
    print("\n" + "\n".join(notes))
    if missed:
        print("numbers that do not agree: " + "; ".join(missed))
    return int(bool(missed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", nargs="*")
    parser.add_argument("--repeats", type=int, default=9)
    OPTIONS = parser.parse_args()
    SEEDS = iter(range(10**9))
    TU: Any = peer("torch-uncertainty", "torch_uncertainty")
    if TU:
        for part in ("metrics", "methods", "models.mlp"):
            importlib.import_module(f"torch_uncertainty.{part}")
    PROBLY: Any = peer("probly", "probly.quantification.classification")
    if PROBLY:
        from probly.metrics import expected_calibration_error as PROBLY_ECE
        from probly.representation import Ensemble as PROBLY_ENSEMBLE
    LAPLACE: Any = peer("laplace-torch", "laplace")
    sys.exit(main())
