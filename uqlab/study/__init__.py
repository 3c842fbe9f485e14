"""Methods and scores by name, the board, own models, baselines, papers, checks.

`evaluate` says in one call how good a model is. It needs the core alone; some files of
this room need more.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from uqlab.core.extras import extra
from uqlab.study import acquire, baselines, bring, decide, methods, scores
from uqlab.study.evaluation import Estimate, Evaluation, evaluate

if TYPE_CHECKING:
    from uqlab.study import check, published, scoreboard

__all__ = [
    "Estimate",
    "Evaluation",
    "acquire",
    "baselines",
    "bring",
    "check",
    "decide",
    "evaluate",
    "methods",
    "published",
    "scoreboard",
    "scores",
]
_LATER = ("check", "published", "scoreboard")  # they need pandas or PyYAML


def __getattr__(name: str) -> Any:
    """Import a file of this room at its first use."""
    if name not in _LATER:
        raise AttributeError(f"module 'uqlab.study' has no attribute {name!r}")
    with extra("notebooks"):
        return import_module(f"uqlab.study.{name}")
