"""Linear layers of a fused ensemble, in which every member has its own heads."""

import contextvars
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from uqlab.ensembles import MemberLayer, MemberModule, MemberParameter, Own

# What the projections that are called next take: the layer, its input and its outputs.
# It belongs to the call: threads may share an ensemble.
_NOTHING = (None, None, {})
_LEFT: contextvars.ContextVar[Any] = contextvars.ContextVar("left", default=_NOTHING)


class Ragged(MemberParameter):
    """Tensors that are of different length along one axis, joined along it.

    Parameters
    ----------
    tensors : sequence of Tensor
        One for each member, of one or two axes.
    axis : int
        The axis, 0 or 1.
    blocks : int
        How many blocks of equal length each tensor has along the axis.
    """

    def __init__(self, tensors: Sequence[Tensor], axis: int, blocks: int = 1):
        nn.Module.__init__(self)
        self.members = len(tensors)
        self.axis = axis
        self.blocks = blocks
        turned = [t.mT if axis else t for t in tensors]
        self.lengths = [len(t) for t in turned]
        self.value = nn.Parameter(torch.cat(turned))
        self.fill(0)

    def fill(self, least: int) -> None:
        """Fill up to `least` from now on: some attentions need all of one length.

        `places` [members, blocks, longest] says from which row of `value` each row of a
        member comes; the row after the last one holds zeros.
        """
        self.least = least
        total = sum(self.lengths)
        longest = max(*self.lengths, least) // self.blocks
        places = torch.full((self.members, self.blocks, longest), total)
        rows = torch.arange(total).split(self.lengths)
        for place, row in zip(places, rows, strict=True):
            place[:, : len(row) // self.blocks] = row.view(self.blocks, -1)
        self.register_buffer("places", places.to(self.value.device), persistent=False)

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.mT if self.axis else tensor

    @property
    def w(self) -> Tensor:
        """The first member's tensor."""
        return self.weight(0)

    def weight(self, m: int) -> Tensor:
        """Return what member `m` sees."""
        return self._turned(self.value.split(self.lengths)[m])

    def weights(self, rows: slice = slice(None)) -> Tensor:
        """Return what some of the members see, filled up with zeros to one length."""
        value = self.value
        places = self.places
        if rows != slice(None):  # perhaps without the longest
            lengths = self.lengths[rows]
            width = max(*lengths, self.least) if any(lengths) else max(self.lengths)
            places = places[rows, :, : width // self.blocks]
        zero = value.new_zeros(1, *value.shape[1:])
        filled = torch.cat([value, zero]).index_select(0, places.flatten())
        return self._turned(filled.view(len(places), -1, *value.shape[1:]))

    def start(self) -> None:
        """Return the members were pruned from weights that are not kept."""

    def own_parameters(self) -> list[nn.Parameter]:
        """All of it is the members' own."""
        return [self.value]

    def keep(self, rows: slice) -> None:
        """Keep some of the members, in place; their memory stays."""
        first = range(self.members)[rows].start
        lengths = self.lengths[rows]
        before = sum(self.lengths[:first])
        self.members = len(lengths)
        self.lengths = lengths
        self.value.data = self.value.data.narrow(0, before, sum(lengths))
        self.fill(self.least)


class GroupedLinear(MemberModule):
    """A projection to or from the heads of all members, in one batched product.

    A member with fewer heads than another gets zeros for those that it lacks, which the
    zeros in its output projection ignore.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return [members * batch, ..., out] for x [members * batch, ..., in]."""
        active = self.active
        own = self.own()
        weight = own["weight"].built(active).mT
        count = x.shape[:-1].numel() // len(weight)
        rows = x.reshape(len(weight), count, x.shape[-1])
        if "bias" in own:
            y = torch.baddbmm(own["bias"].built(active).unsqueeze(1), rows, weight)
        else:
            y = torch.bmm(rows, weight)
        return y.view(*x.shape[:-1], y.shape[-1])

    def member(self, index: int) -> nn.Module:
        """Return a plain layer that computes what member `index` computes."""
        layer = super().member(index)
        layer.out_features, layer.in_features = layer.weight.shape
        return layer


class Projection(MemberLayer):
    """One of the projections of one input that `joint` computes together.

    The first that is called computes all of them, and the others, called with the same
    tensor, take what it left.
    """

    def __init__(self, joint: GroupedLinear, place: int, count: int):
        super().__init__()
        self.members = joint.members
        self.joint = joint
        self.place = place
        self.projections = count

    def forward(self, x: Tensor) -> Tensor:
        """Return [members * batch, ..., out] for x [members * batch, ..., in]."""
        joint = self.joint
        if torch.compiler.is_compiling():
            return joint(x).chunk(self.projections, -1)[self.place]
        of_joint, of_x, outputs = _LEFT.get()
        if of_joint is not joint or of_x is not x or self.place not in outputs:
            outputs = dict(enumerate(joint(x).chunk(self.projections, -1)))
            _LEFT.set((joint, x, outputs))
        y = outputs.pop(self.place)
        if not outputs:
            _LEFT.set(_NOTHING)
        return y

    def member(self, index: int) -> nn.Module:
        """Return a plain layer that computes what member `index` computes."""
        layer: Any = self.joint.member(index)
        for name, p in list(layer.named_parameters()):
            own = p.detach().chunk(self.projections)[self.place].clone()
            setattr(layer, name, nn.Parameter(own, p.requires_grad))
        layer.out_features = len(layer.weight)
        return layer


def grouped(layers: Sequence[Sequence[nn.Linear]]) -> list[nn.Module]:
    """Fold the projections that all members have of one input into one product.

    Parameters
    ----------
    layers : sequence of sequence of nn.Linear
        For each projection a layer of each member; those of one member have the same
        inputs and the same parameters. Their tensors are copied; what the first one
        trains is trained.

    Returns
    -------
    list of nn.Module
        A layer for each projection.
    """
    own = {}
    for name, p in layers[0][0].named_parameters():
        tensors = []
        for of_member in zip(*layers, strict=True):
            parts = [layer.get_parameter(name).detach() for layer in of_member]
            tensors.append(torch.cat(parts))
        shapes = {t.shape for t in tensors}
        if len(shapes) == 1:
            own[name] = Own(nn.Parameter(torch.stack(tensors)))
        else:
            rows = len(set(map(len, tensors))) > 1
            own[name] = Ragged(tensors, 0 if rows else 1, len(layers))
        own[name].requires_grad_(p.requires_grad)
    inner = nn.Linear(1, 1, bias="bias" in own, device="meta")
    joint = GroupedLinear(inner, own)
    if len(layers) == 1:
        return [joint]
    return [Projection(joint, place, len(layers)) for place in range(len(layers))]
