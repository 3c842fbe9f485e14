"""Linear layers of a fused ensemble, in which every member has its own heads."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from uqlab.ensembles import MemberModule, MemberParameter, Own


class Ragged(MemberParameter):
    """Tensors that are of different length along one axis, joined along it.

    Parameters
    ----------
    tensors : sequence of Tensor
        One for each member, of one or two axes.
    axis : int
        The axis, 0 or 1.
    """

    def __init__(self, tensors: Sequence[Tensor], axis: int):
        nn.Module.__init__(self)
        self.members = len(tensors)
        self.axis = axis
        turned = [t.mT if axis else t for t in tensors]
        self.lengths = [len(t) for t in turned]
        self.value = nn.Parameter(torch.cat(turned))
        self.fill(0)

    def fill(self, least: int) -> None:
        """Fill up to `least` from now on: some attentions need all of one length.

        `places` says from which row of `value` each of the `width` rows of each member
        comes; the row after the last one holds zeros.
        """
        self.least = least
        self.width = max(*self.lengths, least)
        places = torch.full((self.members, self.width), sum(self.lengths))
        rows = torch.arange(sum(self.lengths)).split(self.lengths)
        for place, row in zip(places, rows, strict=True):
            place[: len(row)] = row
        places = places.flatten().to(self.value.device)
        self.register_buffer("places", places, persistent=False)

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
        members = self.members
        width = self.width
        if rows != slice(None):  # perhaps without the longest
            lengths = self.lengths[rows]
            members = len(lengths)
            width = max(*lengths, self.least) if any(lengths) else max(self.lengths)
            places = places.view(-1, self.width)[rows, :width].flatten()
        row = value.shape[1:]
        filled = torch.cat((value, value.new_zeros(1, *row))).index_select(0, places)
        return self._turned(filled.view(members, width, *row))

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
        parameters = self.of_members()
        weight = parameters["weight"].built(active).mT
        alone = x.ndim == 3 and len(x) == len(weight)  # one input a member
        count = x.shape[:-1].numel() // len(weight)
        rows = x if alone else x.reshape(len(weight), count, x.shape[-1])
        if "bias" in parameters:
            y = torch.baddbmm(
                parameters["bias"].built(active).unsqueeze(1), rows, weight
            )
        else:
            y = torch.bmm(rows, weight)
        return y if alone else y.view(*x.shape[:-1], y.shape[-1])

    def member(self, index: int) -> nn.Module:
        """Return a plain layer that computes what member `index` computes."""
        layer = super().member(index)
        layer.out_features, layer.in_features = layer.weight.shape
        return layer


def grouped(layers: Sequence[nn.Linear]) -> GroupedLinear:
    """Fold the query, key, value or output projections of all members into one layer.

    Parameters
    ----------
    layers : sequence of nn.Linear
        One for each member. Their tensors are copied; what the first one trains is
        trained.
    """
    parameters = {}
    for name, p in layers[0].named_parameters():
        tensors = [layer.get_parameter(name).detach() for layer in layers]
        shapes = {t.shape for t in tensors}
        if len(shapes) == 1:
            parameters[name] = Own(nn.Parameter(torch.stack(tensors)))
        else:
            lengths = set(map(len, tensors))
            parameters[name] = Ragged(tensors, axis=0 if len(lengths) > 1 else 1)
        parameters[name].requires_grad_(p.requires_grad)
    inner = nn.Linear(1, 1, bias="bias" in parameters, device="meta")
    return GroupedLinear(inner, parameters)
