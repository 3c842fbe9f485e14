"""Methods, scores, the scoreboard, evaluation, decisions and the papers' numbers.

`evaluate` evaluates a model in one call. It needs the core alone; some files of this
room need more.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from uqlab.core.extras import extra
from uqlab.study import baselines, bring, decide, methods, scores
from uqlab.study.evaluation import Evaluation, evaluate

if TYPE_CHECKING:
    from uqlab.study import check, published, scoreboard

__all__ = [
    "Evaluation",
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
