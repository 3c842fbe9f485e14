"""Ensembles: callables `inputs -> logits [members, batch, classes]`, however their members came to be."""

from uqlab.ensembles.adapters import BatchLinear, LoRALinear, SVDLinear
from uqlab.ensembles.base import Ensemble, FoldedEnsemble, SeparateEnsemble, member_seed
from uqlab.ensembles.deep import ELEMENTWISE, concatenate, deep, from_members, snapshot
from uqlab.ensembles.implicit import ATTENTION, DropoutEnsemble, batch, dropout, frozen, lora, singular_value
from uqlab.ensembles.layers import MemberDropout, MemberLayer, MemberLinear, plain_linear, replace_layers, with_layers
from uqlab.ensembles.storage import load, save

__all__ = [
    "ATTENTION",
    "ELEMENTWISE",
    "BatchLinear",
    "DropoutEnsemble",
    "Ensemble",
    "FoldedEnsemble",
    "LoRALinear",
    "MemberDropout",
    "MemberLayer",
    "MemberLinear",
    "SVDLinear",
    "SeparateEnsemble",
    "batch",
    "concatenate",
    "deep",
    "dropout",
    "from_members",
    "frozen",
    "load",
    "lora",
    "member_seed",
    "plain_linear",
    "replace_layers",
    "save",
    "singular_value",
    "snapshot",
    "with_layers",
]  # fmt: skip
