"""What every method must satisfy on a network that nobody here wrote; for the tests and the table in the book."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from networks import Network, logits
from torch import Tensor, nn

from uqlab import ensembles, extraction, heads, training
from uqlab.study import methods

MEMBERS, SEED, TOLERANCE = 3, 5, 1e-4


@dataclass(frozen=True)
class Method:
    """How an ensemble of `members` is made of a network and its inputs, and what does not hold for it by design."""

    label: str
    make: Callable[[nn.Module, Any, int], ensembles.Ensemble]
    saved: bool = True  # by save_pretrained
    alone: bool = True  # member m depends on (seed, m), whatever the number of members
    trained: bool = True  # its members' weights are moved here, as training would


def _laplace(network: nn.Module, inputs: Any, members: int) -> ensembles.Ensemble:
    one = moved(ensembles.lora(network, 1, 2, seed=SEED))
    return ensembles.laplace_lora(one, inputs, members, prior_variance=0.05, seed=SEED)


def _hydra(network: nn.Module, inputs: Any, members: int) -> ensembles.Ensemble:
    layers, count = heads.shape(network)
    pruned = [
        heads.prune(network, [(m % layers, m // layers % count)])
        for m in range(members)
    ]
    return heads.fuse(pruned).eval()


METHODS = {
    "lora": Method("LoRA-Ensemble", lambda net, x, m: ensembles.lora(net, m, 2, seed=SEED)),
    "laplace_lora": Method("Laplace-LoRA", _laplace, trained=False),
    "laplace": Method("last-layer Laplace", lambda net, x, m: ensembles.laplace(net, x, m, seed=SEED), trained=False),
    "singular_value": Method("singular value ensemble", lambda net, x, m: ensembles.singular_value(net, m, seed=SEED)),
    "batch": Method("BatchEnsemble", lambda net, x, m: ensembles.batch(net, m, seed=SEED)),
    "batch_additive": Method("BatchEnsemble++", lambda net, x, m: ensembles.batch(net, m, additive=True, seed=SEED)),
    "masksembles": Method("Masksembles", lambda net, x, m: ensembles.masksembles(net, m, total_members=MEMBERS, seed=SEED)),
    "film": Method("FiLM-Ensemble", lambda net, x, m: ensembles.film(net, m, seed=SEED)),
    "dropout": Method("MC dropout", lambda net, x, m: ensembles.dropout(net, m, 0.3, seed=SEED), trained=False),
    "masks": Method("mask extraction", lambda net, x, m: extraction.masks(net, m, seed=SEED).harden()),
    "tiles": Method("tiles", lambda net, x, m: extraction.tiles(net, 1), alone=False, trained=False),
    "mimo": Method("MIMO", lambda net, x, m: ensembles.mimo(net, m, seed=SEED), alone=False),
    "packed": Method("Packed-Ensembles", lambda net, x, m: ensembles.packed(net, m, total_members=MEMBERS, seed=SEED)),
    "hydra": Method("Hydra", _hydra, alone=False),
    "deep": Method("deep ensemble", lambda net, x, m: ensembles.deep(lambda: methods.fresh(net), m, SEED)),
}  # fmt: skip


def moved(ensemble: ensembles.Ensemble) -> ensembles.Ensemble:
    """Move what is trained away from zeros and equal members, each parameter alike whatever the number of members."""
    with torch.no_grad():
        for p in ensemble.parameters():
            if p.requires_grad:
                generator = torch.Generator().manual_seed(2)
                p += 0.1 * torch.randn(p.shape, generator=generator).to(p)
    return ensemble.eval()


def asked(ensemble: ensembles.Ensemble, inputs: Any) -> Tensor:
    """Return the logits by `predict`, or for tensors by name by a call without gradients."""
    if isinstance(inputs, Tensor):
        return training.predict(ensemble, inputs)
    with torch.no_grad():
        return ensemble(inputs)


def by_member(ensemble: ensembles.Ensemble, inputs: Any, members: int) -> Tensor:
    each = [ensemble.member(m).eval() for m in range(members)]
    return torch.stack([logits(member, inputs).detach() for member in each])


def near(found: Tensor, expected: Tensor, what: str) -> None:
    size = max(1.0, float(expected.abs().max()))
    assert (found - expected).abs().max() < TOLERANCE * size, what


def check(network: Network, name: str, folder: Path) -> None:
    """Hold one method on one network; an AssertionError says what does not hold, a ValueError or
    torch's RuntimeError why it is refused."""
    method, inputs, backbone = METHODS[name], network.inputs(4), network.make()
    before = copy.deepcopy(backbone.state_dict())
    said = logits(backbone, inputs).detach()
    start = method.make(backbone, inputs, MEMBERS)
    ensemble = moved(start) if method.trained else start.eval()
    together = asked(ensemble, inputs)
    apart = by_member(ensemble, inputs, ensemble.members)
    own = any(isinstance(p, ensembles.Own) for p in ensemble.member(0).modules())
    assert own == (name == "laplace_lora"), "a member is no plain network"
    near(together, apart, "predict is not the separate members")
    with torch.enable_grad():
        passed = ensemble(inputs)
    near(passed.detach(), apart, "a pass with gradients is not")
    if passed.requires_grad:
        passed.square().mean().backward()
    for other in apart[1:]:
        least = 1e-5 * max(1.0, float(apart.abs().max()))
        assert (apart[0] - other).abs().max() > least, "members are equal"
    after = backbone.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before), (
        "weights changed"
    )
    assert torch.equal(logits(backbone, inputs), said), "the backbone answers otherwise"
    if method.alone:
        few, many = (
            by_member(method.make(network.make(), inputs, m), inputs, MEMBERS - 1)
            for m in (MEMBERS - 1, MEMBERS)
        )
        near(few, many, "a member depends on how many there are")
    if method.saved:
        ensemble.save_pretrained(folder)
        again = asked(ensembles.from_pretrained(folder, network.make()), inputs)
        assert torch.equal(again, together), "loaded it answers otherwise"


def outcome(network: Network, name: str, folder: Path) -> str:
    """Return why a method is refused, in one sentence; empty if it works."""
    try:
        check(network, name, folder)
    except (ValueError, RuntimeError) as error:
        return " ".join([str(error), *getattr(error, "__notes__", [])])
    return ""


BOOK = Path(__file__).parent.parent / "book" / "guides" / "any_network.md"


def table_of_the_book() -> dict[tuple[str, str], bool]:
    """Read which method works on which network from the table in the book."""
    text = BOOK.read_text(encoding="utf-8")
    rows = [
        line.strip("|").split("|") for line in text.splitlines() if line[:2] == "| "
    ]
    (_, *labels), *cells = [[cell.strip() for cell in row] for row in rows]
    names = {method.label: name for name, method in METHODS.items()}
    return {
        (network, names[label]): cell == "yes"
        for network, *said in cells
        for label, cell in zip(labels, said, strict=True)
    }
