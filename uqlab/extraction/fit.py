"""Cross-entropy of masked members and its gradient with respect to their mask logits, in one pass."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from uqlab.ensembles import FoldedEnsemble, MaskedLinear
from uqlab.training import cross_entropy, softmax_and_loss


def sequence(network: nn.Module) -> list[nn.Module] | None:
    """The modules of a (nested) Sequential in the order of their calls, else None."""
    if type(network) is not nn.Sequential:
        return None
    return [leaf for part in network for leaf in sequence(part) or [part]]


def make_mask_step(ensemble: FoldedEnsemble, flat: bool = False) -> "ChainMaskStep | AutogradMaskStep":
    """The fastest exact step for this ensemble of masks; `flat`: the inputs are [samples, features]."""
    layers = _chain(ensemble.network, flat)
    return AutogradMaskStep(ensemble) if layers is None else ChainMaskStep(layers)


def _chain(network: nn.Module, flat: bool) -> list[MaskedLinear] | None:
    """The layers of a sequence Flatten (linear ReLU [Dropout])* linear, each used once, else None."""
    parts = sequence(network)
    if parts is None or any(m._forward_hooks or m._forward_pre_hooks for m in network.modules()):
        return None
    if type(parts[0]) is nn.Flatten and (parts[0].start_dim, parts[0].end_dim) == (1, -1):
        parts = parts[1:]
    elif not flat:
        return None
    parts = [part for part in parts if type(part) not in (nn.Dropout, nn.Identity)]  # the network is in evaluation mode
    layers = [part for part in parts[::2] if isinstance(part, MaskedLinear)]
    activations = [part for part in parts[1::2] if type(part) is nn.ReLU]
    fits = len(layers) + len(activations) == len(parts) and len(layers) == len(activations) + 1
    return layers if fits and len(set(layers)) == len(layers) else None


class AutogradMaskStep:
    """Any network: gradients by autograd."""

    def __init__(self, ensemble: FoldedEnsemble):
        self.ensemble = ensemble
        layers = [part for part in ensemble.network.modules() if isinstance(part, MaskedLinear)]
        self.logits = [p for layer in layers for p in layer.own_parameters()]

    def __call__(self, x: Float[Tensor, "batch ..."], labels: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
        """Cross-entropy [members] and the gradient of each member's with respect to its logits [members, elements]."""
        outputs = self.ensemble(x)
        values = cross_entropy(outputs, labels.expand(outputs.shape[:2]))
        return values.detach(), torch.cat(torch.autograd.grad(values.sum(), self.logits), 1)


class ChainMaskStep:
    """Multi-layer perceptrons, written out.

    A column mask, being positive, passes through the ReLU before it: ReLU(z r + b) c = ReLU(z (r c) + b c), so that a
    layer costs one product, one affine map and one ReLU. Weights need no gradient. Memory lives as long as the step:
    fresh memory in every call would cost as much as filling it.
    """

    def __init__(self, layers: list[MaskedLinear]):
        self.layers = layers
        self.memory: dict[tuple, Tensor] = {}

    @torch.no_grad()
    def __call__(self, x: Float[Tensor, "batch ..."], labels: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
        """Cross-entropy [members] and the gradient of each member's with respect to its logits [members, elements]."""
        members, batch = self.layers[0].members, len(x)
        masks = [layer.masks() for layer in self.layers]
        maps = [self._affine(i, masks) for i in range(len(self.layers))]
        x = x.flatten(1)
        columns = masks[0][1]
        h = x if columns is None else torch.mul(x, columns[:, None], out=self._buffer("x", members, *x.shape))
        products, activations = [], []
        for i, (layer, (scale, shift)) in enumerate(zip(self.layers, maps, strict=True)):
            # Without a mask on the inputs the first product is one for all members: [batch, in], not [members, ...].
            z = self._buffer(f"z{i}", *h.shape[:-1], len(layer.weight))
            torch.mm(h.flatten(0, -2), layer.weight.mT, out=z.flatten(0, -2))
            products.append(z)
            h = self._buffer(f"h{i}", members, batch, len(layer.weight))
            torch.addcmul(shift[:, None], z, scale[:, None], out=h)
            if layer is not self.layers[-1]:
                h.relu_()
            activations.append(h)
        y = labels.expand(members, batch)
        p, values = softmax_and_loss(h, y)  # p [classes, members, batch]
        p.scatter_add_(0, y[None], p.new_full((1, 1, 1), -1.0).expand(1, members, batch))
        g = p.permute(1, 2, 0).contiguous().div_(batch)  # [members, batch, classes]

        gradients: list[Tensor] = []  # from the last layer to the first, rows before columns
        for i in reversed(range(len(self.layers))):
            (scale, _), z, weight = maps[i], products[i], self.layers[i].weight
            if i < len(self.layers) - 1:
                torch.ops.aten.threshold_backward.grad_input(g, activations[i], 0, grad_input=g)
            # activations[i] is not needed any more: its memory takes the product whose sum is the scale's gradient
            of_scale, of_shift = torch.mul(g, z, out=activations[i]).sum(1), g.sum(1)  # [members, out]
            gradients += self._of_masks(i, masks, of_scale, of_shift)
            if i == 0 and columns is None:
                break
            g.mul_(scale[:, None])
            before = self._buffer(f"g{i}", members, batch, weight.shape[1])
            torch.mm(g.flatten(0, 1), weight, out=before.flatten(0, 1))
            g = before
        if columns is not None:
            gradients.append(g.mul_(x).sum(1) * columns * (1 - columns))
        return values.mean(1), torch.cat(gradients[::-1], 1)

    def _affine(self, i: int, masks: list[tuple[Tensor | None, Tensor | None]]) -> tuple[Tensor, Tensor]:
        """Scale and shift [members, out] of layer i, of which the next layer's column mask is a factor."""
        layer, rows = self.layers[i], masks[i][0]
        columns = masks[i + 1][1] if i + 1 < len(masks) else None
        scale = torch.ones(layer.members, len(layer.weight)).to(layer.weight) if rows is None else rows
        shift = scale.new_zeros(scale.shape[1]) if layer.bias is None else layer.bias
        if columns is None:
            return scale, shift.expand_as(scale)
        return scale * columns, shift * columns

    def _of_masks(self, i: int, masks: list, of_scale: Tensor, of_shift: Tensor) -> list[Tensor]:
        """Gradients for the next layer's column logits and this layer's row logits, where there are any."""
        layer, rows = self.layers[i], masks[i][0]
        columns = masks[i + 1][1] if i + 1 < len(masks) else None
        found = []
        if columns is not None:
            through = of_scale if rows is None else of_scale * rows
            if layer.bias is not None:
                through = through + of_shift * layer.bias
            found.append(through * columns * (1 - columns))
        if rows is not None:
            through = of_scale if columns is None else of_scale * columns
            found.append(through * rows * (1 - rows))
        return found

    def _buffer(self, name: str, *shape: int) -> Tensor:
        if (name, shape) not in self.memory:
            self.memory[name, shape] = self.layers[0].weight.new_empty(shape)
        return self.memory[name, shape]
