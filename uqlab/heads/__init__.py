"""The attention heads of a transformer: importance, circuits, pruning, fusion.

After Hydra Ensembles (Gabetni et al. 2025). A head is a pair (layer, head), counted
from 0. In a network with CLIP's two towers, such as `models.ZeroShot`, it is ("text" or
"vision", layer, head). A model is a network with one stack of attention layers, whose
projections are named as in one of `models.FORMS`. `models.attentions` finds them.
"""

from uqlab.heads.features import Separation, head_features, separation
from uqlab.heads.fusion import FusedEnsemble, fuse
from uqlab.heads.importance import (
    Circuit,
    greedy_circuit,
    sample_heads,
    taylor_heads,
    taylor_scores,
)
from uqlab.heads.pruning import ablate, count_heads, multiply_adds, prune, shape, towers

__all__ = [
    "Circuit",
    "FusedEnsemble",
    "Separation",
    "ablate",
    "count_heads",
    "fuse",
    "greedy_circuit",
    "head_features",
    "multiply_adds",
    "prune",
    "sample_heads",
    "separation",
    "shape",
    "taylor_heads",
    "taylor_scores",
    "towers",
]
