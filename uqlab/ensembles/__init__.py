"""Ensembles: callables `inputs -> logits [members, batch, classes]`.

One method, one file: what a member's parameter is, and the function that makes the
ensemble.
"""

from uqlab.ensembles.base import (
    Ensemble,
    FoldedEnsemble,
    SeparateEnsemble,
    member_generators,
    member_seed,
)
from uqlab.ensembles.batch_ensemble import Scaled, batch, batch_ensemble
from uqlab.ensembles.deep import ELEMENTWISE, deep, from_members
from uqlab.ensembles.dropout import DropoutEnsemble, dropout, place_dropout
from uqlab.ensembles.export import export
from uqlab.ensembles.film import film
from uqlab.ensembles.implicit import implicit, plain, weights_of
from uqlab.ensembles.laplace import laplace_lora, projection_curvature
from uqlab.ensembles.last_layer import laplace
from uqlab.ensembles.layers import (
    MemberDropout,
    MemberLayer,
    own_dropout,
    plain_linear,
    replace_layers,
    with_layers,
)
from uqlab.ensembles.lora import LowRank, lora
from uqlab.ensembles.masksembles import MaskedInputs, masksembles
from uqlab.ensembles.members import (
    MemberModule,
    MemberParameter,
    Own,
    built_once,
    stack_layers,
)
from uqlab.ensembles.mimo import MIMOEnsemble, mimo
from uqlab.ensembles.packed import GroupedLinear, packed
from uqlab.ensembles.singular_value import SingularValues, singular_value
from uqlab.ensembles.snapshot import snapshot
from uqlab.ensembles.storage import concatenate, load, save
from uqlab.models import ATTENTION

__all__ = [
    "ATTENTION", "ELEMENTWISE", "DropoutEnsemble", "Ensemble", "FoldedEnsemble",
    "GroupedLinear", "LowRank", "MIMOEnsemble", "MaskedInputs", "MemberDropout",
    "MemberLayer", "MemberModule", "MemberParameter", "Own", "Scaled",
    "SeparateEnsemble", "SingularValues", "batch", "batch_ensemble", "built_once",
    "concatenate", "deep", "dropout", "export", "film", "from_members", "implicit",
    "laplace", "laplace_lora", "load", "lora", "masksembles", "member_generators",
    "member_seed", "mimo", "own_dropout", "packed", "place_dropout", "plain",
    "plain_linear", "projection_curvature", "replace_layers", "save", "singular_value",
    "snapshot", "stack_layers", "weights_of", "with_layers",
]  # fmt: skip
