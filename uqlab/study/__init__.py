"""Methods and scores by name, the board, own models, baselines, papers, checks."""

from uqlab.core.extras import extra

with extra("notebooks"):
    from uqlab.study import (
        acquire,
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
    "acquire",
    "baselines",
    "bring",
    "check",
    "decide",
    "methods",
    "published",
    "scoreboard",
    "scores",
]
