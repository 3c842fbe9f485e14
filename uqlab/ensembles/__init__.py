"""Ensembles: callables `inputs -> logits [members, batch, classes]`, however their members came to be.

One method, one file: its layer and its function.
"""

from uqlab.core import door
from uqlab.ensembles.base import Ensemble, FoldedEnsemble, SeparateEnsemble, member_seed
from uqlab.ensembles.batch_ensemble import BatchConv2d, BatchLinear, batch, batch_ensemble
from uqlab.ensembles.deep import ELEMENTWISE, deep, from_members
from uqlab.ensembles.dropout import DropoutEnsemble, dropout, place_dropout
from uqlab.ensembles.film import film
from uqlab.ensembles.implicit import ATTENTION
from uqlab.ensembles.laplace import laplace_lora, projection_curvature
from uqlab.ensembles.layers import (
    MemberDropout,
    MemberLayer,
    MemberLinear,
    own_dropout,
    plain_linear,
    replace_layers,
    with_layers,
)
from uqlab.ensembles.lora import LoRAConv2d, LoRALinear, lora
from uqlab.ensembles.masksembles import MaskedInputs, masksembles
from uqlab.ensembles.mimo import MIMOEnsemble, mimo
from uqlab.ensembles.norms import MemberBatchNorm, MemberLayerNorm
from uqlab.ensembles.packed import GroupedLinear, MemberConv2d, packed
from uqlab.ensembles.singular_value import SVDLinear, singular_value
from uqlab.ensembles.snapshot import snapshot
from uqlab.ensembles.storage import concatenate, load, save

__all__ = [
    "ATTENTION", "ELEMENTWISE", "BatchConv2d", "BatchLinear", "DropoutEnsemble", "Ensemble", "FoldedEnsemble",
    "GroupedLinear", "LoRAConv2d", "LoRALinear", "MIMOEnsemble", "MaskedInputs", "MemberBatchNorm", "MemberConv2d",
    "MemberDropout", "MemberLayer", "MemberLayerNorm", "MemberLinear", "SVDLinear", "SeparateEnsemble", "batch",
    "batch_ensemble", "concatenate", "deep", "dropout", "film", "from_members", "laplace_lora", "load", "lora",
    "masksembles", "member_seed", "mimo", "own_dropout", "packed", "place_dropout", "plain_linear",
    "projection_curvature", "replace_layers", "save", "singular_value", "snapshot", "with_layers",
]  # fmt: skip

door.room(__name__)
