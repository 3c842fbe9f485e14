"""Ensembles: callables `inputs -> logits [members, batch, classes]`.

One method, one file: what one member sees, and the function that makes the ensemble.
"""

from uqlab.ensembles.adapters import to_peft
from uqlab.ensembles.base import (
    Ensemble,
    MeanGradient,
    OneNetwork,
    SeparateEnsemble,
    member_generators,
    member_range,
    member_seed,
)
from uqlab.ensembles.batch_ensemble import Scaled, batch
from uqlab.ensembles.deep import deep, from_members
from uqlab.ensembles.dropout import DropoutEnsemble, dropout, place_dropout
from uqlab.ensembles.export import export
from uqlab.ensembles.film import film
from uqlab.ensembles.folders import from_pretrained
from uqlab.ensembles.functional import GENERATOR, Own
from uqlab.ensembles.implicit import implicit, plain, plain_linear, weights_of
from uqlab.ensembles.laplace import laplace, laplace_lora, projection_curvature
from uqlab.ensembles.lora import LowRank, lora
from uqlab.ensembles.masksembles import MaskedInputs, masksembles
from uqlab.ensembles.mimo import MIMOEnsemble, mimo
from uqlab.ensembles.packed import packed
from uqlab.ensembles.recipes import METHODS, recorded
from uqlab.ensembles.shards import concatenate
from uqlab.ensembles.singular_value import SingularValues, singular_value
from uqlab.ensembles.snapshot import snapshot
from uqlab.models import ATTENTION

__all__ = [
    "ATTENTION", "GENERATOR", "METHODS", "DropoutEnsemble", "Ensemble",
    "LowRank", "MIMOEnsemble", "MaskedInputs", "MeanGradient", "OneNetwork", "Own",
    "Scaled", "SeparateEnsemble", "SingularValues", "batch",
    "concatenate", "deep", "dropout", "export", "film", "from_members",
    "from_pretrained", "implicit", "laplace", "laplace_lora", "lora", "masksembles",
    "member_generators", "member_range", "member_seed", "mimo", "packed",
    "place_dropout", "plain", "plain_linear", "projection_curvature", "recorded",
    "singular_value", "snapshot", "to_peft", "weights_of",
]  # fmt: skip
