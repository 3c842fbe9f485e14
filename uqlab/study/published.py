"""What the papers report, from published.yaml: `kirsch.table_2.frame("mnist")`.

Papers: kirsch, lora, sve, hydra, regrad, and the public results of
uncertainty_baselines. A paper's tables and figures have its numbers
of a data set, its statements about it, and its settings, by the names of the pages'
parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml


class Says(NamedTuple):
    """Whether a claim holds in a paper, and where the paper says so."""

    holds: bool
    text: str  # with the paper's numbers


class Table:
    """A table or a figure of a paper.

    Data sets are named as in `data.load`; a `-mini` counts as its official set.

    Attributes
    ----------
    settings
        Parameter -> the paper's value.
    """

    def __init__(self, title: str, entry: Mapping[str, Any]):
        self.title = entry.get("where", title)
        self.entry = entry
        self.settings = dict(entry.get("settings", {}))
        self.datasets = list(entry.get("data", {}))

    def frame(self, dataset: str, section: str = "data") -> pd.DataFrame:
        """Return the numbers of a data set, in the paper's units; empty without any.

        Parameters
        ----------
        section
            Or "deviations": what the paper prints behind a plus-minus sign.
        """
        rows = self.entry.get(section, {}).get(dataset.removesuffix("-mini"), {})
        return pd.DataFrame.from_dict(  # no columns: rows name their own
            rows, "index", columns=self.entry.get("columns") if rows else None
        )

    def value(self, dataset: str, row: Any, column: str) -> float:
        """Return one number; KeyError where the paper has none."""
        return float(self.frame(dataset).loc[row, column])  # type: ignore[arg-type]

    def says(
        self, dataset: str, rule: Callable[[pd.DataFrame], Any], *cells: tuple[Any, str]
    ) -> Says | None:
        """Tell whether a rule holds for the paper's numbers of a data set.

        Parameters
        ----------
        cells
            (row, column) of the numbers to show beside the answer.

        Returns
        -------
        Says or None
            None if one of the numbers is missing.
        """
        frame = self.frame(dataset)
        if frame.empty:
            return None
        low, high = (bool(rule(frame.fillna(v))) for v in (-float("inf"), float("inf")))
        if low != high:  # it depends on a missing number
            return None
        numbers = ", ".join(f"{frame.loc[cell]:g}" for cell in cells)
        return Says(low, f"{self.title}: {numbers}" if numbers else self.title)

    def states(self, dataset: str, name: str) -> Says | None:
        """Return what the paper says of a data set in words; None if nothing.

        Parameters
        ----------
        name
            Of the statement in published.yaml.
        """
        stated = self.entry.get("states", {})
        if not any(name in statements for statements in stated.values()):
            raise ValueError(f"{self.title} states nothing named {name!r}")
        words = stated.get(dataset.removesuffix("-mini"), {}).get(name)
        return words and Says(words["holds"], f"{self.title}: “{words['quote']}”")


class Paper:
    """A paper's tables and figures by name: `table_2`, `fig_4`."""

    def __init__(self, entry: Mapping[str, Any]):
        self.entry = entry
        self.source = entry["source"]

    def __getattr__(self, name: str) -> Table:
        if name not in dir(self):
            tables = ", ".join(dir(self))
            raise AttributeError(f"{self.source}: no {name}; there are {tables}")
        title = name.capitalize().replace("Fig_", "Fig._").replace("_", " ")
        return Table(f"{self.source}, {title}", self.entry[name])

    def __dir__(self) -> Iterable[str]:
        return [name for name in self.entry if "_" in name]


def differs(settings: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[str]:
    """Return the settings in which a run is not the paper's.

    Where a setting is a list, the run's must hold all its values and may hold more.

    Examples
    --------
    >>> differs({"members": 10, "widths": [1, 2]}, {"members": 5, "widths": [1, 2, 4]})
    ['members']
    """

    def same(theirs, ours):
        if isinstance(theirs, list) and isinstance(ours, list | tuple):
            return all(value in ours for value in theirs)
        return theirs == ours

    return [name for name in settings if not same(settings[name], parameters.get(name))]


# Where PyYAML was built with C, a tenth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TEXT = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
_PAPERS = {name: Paper(entry) for name, entry in yaml.load(_TEXT, _LOADER).items()}
kirsch = _PAPERS["kirsch"]
lora = _PAPERS["lora"]
sve = _PAPERS["sve"]
hydra = _PAPERS["hydra"]
regrad = _PAPERS["regrad"]
uncertainty_baselines = _PAPERS["uncertainty_baselines"]
