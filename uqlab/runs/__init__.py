"""Notebooks run headless: parameters checked first, numbers recorded, a folder a run.

In a notebook: `check`, `begin`, `record`, `claim`, `fallen`, `committed`, `load`. On
the command line: `uqlab run`, `sweep`, `collect`, `gallery`, `lab`. From
code: `execute` for one notebook into any folder, `sweep` and `run_one` for runs that
are computed once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from uqlab.core.extras import extra
from uqlab.core.recording import (
    begin,
    claim,
    claims,
    committed,
    describe_figure,
    fallen,
    output_dir,
    record,
)

if TYPE_CHECKING:
    from uqlab.runs.execution import RunError, execute, run_one, summary, sweep
    from uqlab.runs.manifest import cached
    from uqlab.runs.parameters import check
    from uqlab.runs.tables import load

__all__ = [
    "RunError",
    "begin",
    "cached",
    "check",
    "claim",
    "claims",
    "committed",
    "describe_figure",
    "execute",
    "fallen",
    "load",
    "output_dir",
    "record",
    "run_one",
    "summary",
    "sweep",
]
_LATER = {  # so that a page that only records needs no other file of this room
    "RunError": "execution",
    "cached": "manifest",
    "check": "parameters",
    "execute": "execution",
    "load": "tables",
    "run_one": "execution",
    "summary": "execution",
    "sweep": "execution",
}


def __getattr__(name: str) -> Any:
    """Import a file of this room at its first use."""
    if name not in _LATER:
        raise AttributeError(f"module 'uqlab.runs' has no attribute {name!r}")
    with extra("notebooks"):
        return getattr(import_module(f"uqlab.runs.{_LATER[name]}"), name)
