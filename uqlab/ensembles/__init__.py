"""Ensembles: callables `inputs -> logits [members, batch, classes]`.

One method, one file: what one member sees, and the function that makes the ensemble.
"""

from uqlab.ensembles.base import (
    GENERATOR,
    LOADERS,
    Ensemble,
    MeanGradient,
    OneNetwork,
    Own,
    member_generators,
    member_range,
    member_seed,
    recorded,
)
from uqlab.ensembles.batch_ensemble import Scaled, batch
from uqlab.ensembles.deep import concatenate, deep, from_members, snapshot
from uqlab.ensembles.dropout import dropout, place_dropout
from uqlab.ensembles.export import export
from uqlab.ensembles.film import film
from uqlab.ensembles.folders import from_pretrained, to_peft
from uqlab.ensembles.implicit import implicit, plain, weights_of
from uqlab.ensembles.laplace import laplace, laplace_lora, projection_curvature
from uqlab.ensembles.lora import LowRank, lora
from uqlab.ensembles.masksembles import masksembles
from uqlab.ensembles.mimo import mimo
from uqlab.ensembles.packed import packed
from uqlab.ensembles.singular_value import SingularValues, singular_value
from uqlab.models import ATTENTION

__all__ = [
    "ATTENTION", "GENERATOR", "LOADERS", "Ensemble", "LowRank", "MeanGradient",
    "OneNetwork", "Own", "Scaled", "SingularValues", "batch", "concatenate", "deep",
    "dropout", "export", "film", "from_members", "from_pretrained", "implicit",
    "laplace", "laplace_lora", "lora", "masksembles", "member_generators",
    "member_range", "member_seed", "mimo", "packed", "place_dropout", "plain",
    "projection_curvature", "recorded", "singular_value", "snapshot", "to_peft",
    "weights_of",
]  # fmt: skip
