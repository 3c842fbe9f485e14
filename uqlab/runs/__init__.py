"""Notebooks run headless: parameters checked first, numbers recorded, one self-describing folder per run.

In a notebook: `begin`, `record`, `load`. On the command line: `uqlab run`, `sweep`, `collect`, `gallery`, `lab`,
`dashboards`. From code: `run_one`. Importing this room is cheap; papermill is imported where a notebook is executed.
"""

from uqlab.core.recording import begin, describe_figure, output_dir, record
from uqlab.runs.execution import RunError, run_one
from uqlab.runs.sweeps import summary, sweep
from uqlab.runs.tables import load

__all__ = ["RunError", "begin", "describe_figure", "load", "output_dir", "record", "run_one", "summary", "sweep"]
