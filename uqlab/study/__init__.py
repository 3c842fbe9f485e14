"""Methods and scores by name, the board, own models, baselines, papers, checks."""

from uqlab.study import (
    baselines,
    bring,
    check,
    decide,
    methods,
    published,
    scoreboard,
    scores,
)

__all__ = [
    "baselines",
    "bring",
    "check",
    "decide",
    "methods",
    "published",
    "scoreboard",
    "scores",
]
