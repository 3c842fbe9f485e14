"""Laplace: Gaussians around trained weights, of a LoRA network or of the last matrices of CLIP's towers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.core.checks import count_samples, representable
from uqlab.core.modules import Inputs, evaluating, hooked, like_parameters, map_tensors
from uqlab.ensembles.base import Ensemble, FoldedEnsemble, member_range, member_seed
from uqlab.ensembles.layers import with_layers
from uqlab.ensembles.lora import LowRank
from uqlab.ensembles.members import MemberModule


class Curvature(NamedTuple):
    """The generalised Gauss-Newton matrix of the summed loss by one weight [out, in]: outputs (x) inputs."""

    outputs: Tensor  # [out, out]: sum over inputs, places and classes of the outer products of what reaches the output
    inputs: Tensor  # [in, in]: mean over inputs and places of the outer products of what enters

    def draw(self, prior_precision: float, generator: torch.Generator) -> Tensor:
        """A weight [out, in] from Normal(0, (outputs (x) inputs + prior_precision I)^-1)."""
        return self.draws(prior_precision, [generator])[0]

    def draws(
        self, prior_precision: float, generators: Sequence[torch.Generator]
    ) -> Tensor:
        """What `draw` gives for each generator [generators, out, in], by one eigendecomposition for all."""
        (large, u), (small, v) = (
            torch.linalg.eigh(self.outputs),
            torch.linalg.eigh(self.inputs),
        )
        precision = (
            torch.outer(large.clamp(min=0), small.clamp(min=0)) + prior_precision
        )
        noise = (
            torch.randn(precision.shape, generator=g, dtype=torch.float64)
            for g in generators
        )
        return torch.stack(
            [u @ (each.to(u) / precision.sqrt()) @ v.mT for each in noise]
        )


def laplace_lora(
    trained: Ensemble,
    inputs: Inputs,
    members: int | str | range,
    *,
    prior_variance: float = 1e-3,
    batch_size: int = 64,
    seed: int = 0,
) -> FoldedEnsemble:
    """Laplace-LoRA: members drawn around one trained LoRA network, A and B by a Kronecker posterior (Yang et al. 2024).

    trained: `lora(backbone, 1, ...)` after training; its classifier stays as it is.
    inputs: those that it was trained on, [samples, ...]; a generalised Gauss-Newton matrix needs no labels.
    prior_variance: of each number in A and B; Muhlematter et al. 2024 (appendix W) take 0.001.

    The precision of A, and that of B, is G (x) S + I / prior_variance, with the curvature G of the layer's outputs and
    the second moment S of its inputs, for a convolution those of its patches. Yang et al. approximate the larger factor
    by a low rank; here both are whole. Member m depends on (seed, m) and `trained` alone. `save` writes the members'
    weights as those of `lora`.

    Raises TypeError unless `trained` is a LoRA-Ensemble, ValueError for more than one member of it, a prior variance
    that is not positive and inputs that are not finite.
    """
    if (
        not isinstance(trained, FoldedEnsemble)
        or (trained.recipe or {}).get("method") != "lora"
    ):
        raise TypeError(
            f"laplace_lora takes a network that `lora` made, got {type(trained).__name__}"
        )
    if trained.members != 1:
        raise ValueError(
            f"laplace_lora takes one trained network, lora(backbone, 1), got {trained.members} members"
        )
    ids, found = member_range(members), curvatures(trained, inputs, batch_size)
    network = with_layers(
        trained.network, lambda layer: layer.join([layer] * (len(ids) - 1))
    )
    for number, (name, (down, up)) in enumerate(found.items()):
        layer: Any = network.get_submodule(name)
        generators = [
            torch.Generator().manual_seed(member_seed(seed, m, "laplace", number))
            for m in ids
        ]
        for p, curvature in ((layer.weight.down, down), (layer.weight.up, up)):
            p.data += curvature.draws(1 / prior_variance, generators).to(p).view_as(p)
    return trained._with_recipe(FoldedEnsemble(network, ids)).eval()


def curvatures(
    trained: FoldedEnsemble, inputs: Inputs, batch_size: int = 64
) -> dict[str, tuple[Curvature, Curvature]]:
    """Of every layer with LoRA, by name: the curvatures of A and of B, at the first member, in float64."""
    units = {
        name: part
        for name, part in trained.network.named_modules()
        if isinstance(part, MemberModule)
    }
    layers = {
        name: unit
        for name, unit in units.items()
        if isinstance(unit.own().get("weight"), LowRank)
    }
    others = [
        name
        for name, unit in units.items()
        if any(isinstance(p, LowRank) for p in unit.own().values())
    ]
    if missed := [
        name for name in others if name not in layers or not _shows(layers[name].inner)
    ]:
        kind = type(units[missed[0]].inner).__name__
        raise ValueError(
            f"laplace_lora needs layers whose inputs and outputs can be seen, which {kind} {missed[0]!r} "
            "does not show; make the LoRA network with a target of linear layers and plain convolutions"
        )
    samples, sums, rows = (
        count_samples(inputs),
        {name: [] for name in layers},
        dict.fromkeys(layers, 0),
    )
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Any:
        return lambda _, args, y: kept.update({name: (args[0].detach(), y)})

    with evaluating(trained), torch.enable_grad():
        for begin in range(0, samples, batch_size):
            x = like_parameters(
                trained, map_tensors(lambda t, i=begin: t[i : i + batch_size], inputs)
            )
            with hooked(
                layer.register_forward_hook(keep(name))
                for name, layer in layers.items()
            ):
                logits = trained(x)[0]
            if unused := [name for name in layers if name not in kept]:
                raise ValueError(
                    f"laplace_lora sees no call of {unused[0]!r}: the network reads its weight elsewhere"
                )
            slopes = _square_root(logits)
            outputs = [kept[name][1] for name in layers]
            each = [
                torch.autograd.grad(logits, outputs, slope, retain_graph=True)
                for slope in slopes
            ]
            for i, (name, layer) in enumerate(layers.items()):
                low: Any = layer.weight
                a, b = (low.scale * p.detach()[0].double() for p in (low.down, low.up))
                seen = (
                    _patches(layer.inner, kept[name][0]).flatten(0, -2).double()
                )  # [rows, in]
                last = 1 if isinstance(layer.inner, nn.Conv2d) else -1
                back = torch.cat(
                    [slope[i].movedim(last, -1).flatten(0, -2) for slope in each]
                ).double()  # [..., out]
                new = [
                    back @ b,
                    seen,
                    back,
                    seen @ a.mT,
                ]  # A's output and input, B's output and input
                moments = [t.mT @ t for t in new]
                sums[name] = (
                    [s + t for s, t in zip(sums[name], moments, strict=True)]
                    if sums[name]
                    else moments
                )
                rows[name] += len(seen)
    return {
        name: (
            Curvature(each[0], each[1] / rows[name]),
            Curvature(each[2], each[3] / rows[name]),
        )
        for name, each in sums.items()
    }


@torch.no_grad()
def projection_curvature(
    h: Float[Tensor, "samples width"], weight: Float[Tensor, "features width"],
    others: Float[Tensor, "classes features"], scale: float | Tensor,
) -> Curvature:  # fmt: skip
    """The curvature of the last matrix of one of CLIP's towers, for the other tower's unit vectors `others`.

    The logits are scale * u . others^T with the unit vector u of h weight^T. The other tower counts as fixed, and the
    loss as that of samples against all of `others` (BayesVLM, Baumann et al. 2024).
    """
    z = h @ weight.T
    u, length = F.normalize(z), z.norm(dim=1)[:, None, None]
    p = (scale * u @ others.T).softmax(1)[..., None]
    slopes = (
        scale * (others - (u @ others.T)[..., None] * u[:, None]) / length
    )  # d logits / d z
    roots = (
        ((slopes - (p * slopes).sum(1, keepdim=True)) * p.sqrt()).flatten(0, 1).double()
    )
    representable("curvatures", roots)
    return Curvature(roots.T @ roots, h.T.double() @ h.double() / len(h))


def _shows(layer: Any) -> bool:
    """Whether what a layer multiplies can be read from its inputs."""
    return type(layer) is nn.Linear or (
        type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros"
    )


def _patches(layer: nn.Module, x: Tensor) -> Tensor:
    """What each place of the output is made from, in the last axis: x itself, or the patches of a convolution."""
    if not isinstance(layer, nn.Conv2d):
        return x
    size, padding = layer.kernel_size, layer.padding
    if padding == "same":  # as torch pads: the odd row and column at the end
        total = [
            each * (length - 1)
            for each, length in zip(layer.dilation, size, strict=True)
        ]
        x = F.pad(
            x,
            [
                total[1] // 2,
                total[1] - total[1] // 2,
                total[0] // 2,
                total[0] - total[0] // 2,
            ],
        )
    padding = 0 if isinstance(padding, str) else padding
    return F.unfold(x, size, layer.dilation, padding, layer.stride).mT


def _square_root(logits: Tensor) -> Tensor:
    """Columns s_c [classes, batch, classes] with sum_c s_c s_c^T = diag(p) - p p^T, the loss's curvature by logits."""
    p = logits.detach().softmax(-1)
    return (torch.eye(p.shape[-1]).to(p)[:, None] - p) * p.T.sqrt()[..., None]
