"""Notebooks run headless: parameters checked first, numbers recorded, one self-describing folder per run.

In a notebook: `check`, `begin`, `record`, `claim`, `committed`, `load`. On the command line: `uqlab run`, `sweep`,
`collect`, `gallery`, `lab`, `dashboards`. From code: `execute` for one notebook into any folder, `sweep`
and `run_one` for runs computed once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from uqlab.core.recording import (
    begin,
    claim,
    claims,
    committed,
    describe_figure,
    output_dir,
    record,
)

if TYPE_CHECKING:
    from uqlab.runs.execution import RunError, execute
    from uqlab.runs.rules import check
    from uqlab.runs.sweeps import run_one, summary, sweep
    from uqlab.runs.tables import load

__all__ = [
    "RunError", "begin", "check", "claim", "claims", "committed", "describe_figure", "execute", "load",
    "output_dir", "record", "run_one", "summary", "sweep",
]  # fmt: skip
_LATER = {
    "execution": ("RunError", "execute"),
    "rules": ("check",),
    "sweeps": ("run_one", "summary", "sweep"),
    "tables": ("load",),
}


def __getattr__(name: str) -> Any:
    """Import a file of this room at the first use: a notebook that only records does not depend on the others."""
    for file, names in _LATER.items():
        if name in names:
            return getattr(import_module(f"uqlab.runs.{file}"), name)
    raise AttributeError(f"module 'uqlab.runs' has no attribute {name!r}")
