"""The attention heads of a transformer: their importance, circuits, pruning and fusion."""

from uqlab.heads.attention import Head
from uqlab.heads.circuits import Circuit, greedy_circuit
from uqlab.heads.fusion import FusedEnsemble, fuse
from uqlab.heads.importance import (
    Separation,
    ablate,
    count_heads,
    head_features,
    multiply_adds,
    prune,
    sample_heads,
    separation,
    shape,
    taylor_heads,
    taylor_scores,
)

__all__ = [
    "Circuit", "FusedEnsemble", "Head", "Separation", "ablate", "count_heads", "fuse", "greedy_circuit",
    "head_features", "multiply_adds", "prune", "sample_heads", "separation", "shape", "taylor_heads", "taylor_scores",
]  # fmt: skip
