"""The papers' numbers and statements: `published.kirsch.table_2.frame("mnist")`.

Papers: kirsch, lora, sve, hydra, regrad, and the public results of
uncertainty_baselines. Everything comes from published.yaml. Data sets are named as in
`data.load`; a `-mini` counts as its official set.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pandas as pd
import yaml


class _Says(NamedTuple):
    """Whether a claim holds in a paper, and where the paper says so."""

    holds: bool
    text: str  # with the paper's numbers


class _Table:
    """A table or a figure of a paper, with the paper's settings by parameter."""

    def __init__(self, title: str, entry: Mapping[str, Any]):
        self.title = entry.get("where", title)
        self.entry = entry
        self.settings = entry.get("settings", {})
        self.datasets = list(entry.get("data", {}))

    def frame(self, dataset: str) -> pd.DataFrame:
        """Return the numbers of a data set in the paper's units; empty without any."""
        rows = self.entry.get("data", {}).get(dataset.removesuffix("-mini"), {})
        columns = self.entry.get("columns") if rows else None  # or rows name their own
        return pd.DataFrame.from_dict(rows, "index", columns=columns)

    def says(
        self, dataset: str, rule: Callable[[pd.DataFrame], Any], *cells: tuple[Any, str]
    ) -> _Says | None:
        """Apply a rule to the numbers of a data set; None if it needs a missing one.

        Parameters
        ----------
        dataset
            Name of the data set.
        rule
            A function of its `frame`, true or false.
        *cells
            (row, column) of the numbers to quote.
        """
        frame = self.frame(dataset)
        low = not frame.empty and bool(rule(frame.fillna(-float("inf"))))
        if frame.empty or low != bool(rule(frame.fillna(float("inf")))):
            return None
        numbers = ", ".join(f"{frame.loc[cell]:g}" for cell in cells)
        return _Says(low, f"{self.title}: {numbers}" if numbers else self.title)

    def states(self, dataset: str, name: str) -> _Says | None:
        """Return a named statement of the paper about a data set; None without one."""
        stated = self.entry.get("states", {})
        if not any(name in statements for statements in stated.values()):
            raise ValueError(f"{self.title} states nothing named {name!r}")
        words = stated.get(dataset.removesuffix("-mini"), {}).get(name)
        return words and _Says(words["holds"], f"{self.title}: “{words['quote']}”")


def differs(settings: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings in which a run is not the paper's.

    Where a setting is a list, the run's must hold all its values and may hold more.

    Examples
    --------
    >>> differs({"members": 10, "widths": [1, 2]}, {"members": 5, "widths": [1, 2, 4]})
    ['members']
    """
    unlike = []
    for name, theirs in settings.items():
        ours = parameters.get(name)
        if isinstance(theirs, list) and isinstance(ours, list | tuple):
            same = set(theirs) <= set(ours)
        else:
            same = theirs == ours
        unlike += [] if same else [name]
    return unlike


def _paper(entry):
    """Return a paper with its source and its tables: `table_2`, `fig_4`."""
    tables = {}
    for name in entry:
        kind, _, number = name.partition("_")
        if number:
            word = "Fig." if kind == "fig" else kind.capitalize()
            tables[name] = _Table(f"{entry['source']}, {word} {number}", entry[name])
    return SimpleNamespace(source=entry["source"], text=entry.get("text"), **tables)


_TEXT = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C: a tenth of the time
_PAPERS = {name: _paper(entry) for name, entry in yaml.load(_TEXT, _LOADER).items()}
kirsch = _PAPERS["kirsch"]
lora = _PAPERS["lora"]
sve = _PAPERS["sve"]
hydra = _PAPERS["hydra"]
regrad = _PAPERS["regrad"]
uncertainty_baselines = _PAPERS["uncertainty_baselines"]
