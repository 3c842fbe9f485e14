"""What the papers report, once for all pages: `published.kirsch.table_2.frame("mnist")`; the numbers: published.yaml.

Papers: kirsch, lora, sve, hydra, regrad. A paper's tables and figures have its numbers of a data set, its statements
about it, and its settings, by the names of the pages' parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from uqlab.core import door

if TYPE_CHECKING:
    from pandas import DataFrame


class Says(NamedTuple):
    """Whether a claim holds in a paper, and where the paper says so, with its numbers."""

    holds: bool
    text: str


class Table:
    """A table or a figure of a paper. Data sets are named as in `data.load`; a `-mini` counts as its official set.

    settings: parameter -> the paper's value.
    """

    def __init__(self, title: str, entry: Mapping[str, Any]):
        self.title: str = entry.get("where", title)
        self.entry = entry
        self.settings: dict[str, Any] = dict(entry.get("settings", {}))
        self.datasets: list[str] = list(entry.get("data", {}))

    def frame(self, dataset: str) -> "DataFrame":
        """The paper's numbers of a data set, in the paper's units; empty where it has none."""
        import pandas

        rows = self.entry.get("data", {}).get(dataset.removesuffix("-mini"), {})
        listed = any(isinstance(values, list) for values in rows.values())
        return pandas.DataFrame.from_dict(
            rows, "index", columns=self.entry["columns"] if listed else None
        )

    def value(self, dataset: str, row: Any, column: str) -> float:
        """One number; KeyError where the paper has none."""
        return float(self.frame(dataset).loc[row, column])

    def says(
        self, dataset: str, rule: Callable[["DataFrame"], Any], *cells: tuple[Any, str]
    ) -> Says | None:
        """Whether a rule holds for the paper's numbers of this data set; None if one of them is missing.

        cells: (row, column) of the numbers to show beside the answer.
        """
        frame = self.frame(dataset)
        if frame.empty:
            return None
        low, high = (
            bool(rule(frame.fillna(value))) for value in (float("-inf"), float("inf"))
        )
        numbers = ", ".join(f"{frame.loc[row, column]:g}" for row, column in cells)
        return (
            Says(low, self.title + (f": {numbers}" if numbers else ""))
            if low == high
            else None
        )

    def states(self, dataset: str, name: str) -> Says | None:
        """What the paper says in words of this data set, under one of the names in published.yaml; None if nothing."""
        stated = self.entry.get("states", {})
        if name not in {known for each in stated.values() for known in each}:
            raise KeyError(f"{self.title} states nothing named {name!r}")
        found = stated.get(dataset.removesuffix("-mini"), {}).get(name)
        return found and Says(found["holds"], f"{self.title}: “{found['quote']}”")


class Paper:
    """A paper's tables and figures by name: `table_2`, `fig_4`."""

    def __init__(self, entry: Mapping[str, Any]):
        self.entry = entry
        self.source: str = entry["source"]

    def __getattr__(self, name: str) -> Table:
        if name not in self.entry or "_" not in name:
            raise AttributeError(
                f"{self.source}: no {name}; there are {', '.join(dir(self))}"
            )
        kind, _, number = name.partition("_")
        return Table(
            f"{self.source}, {kind.capitalize()} {number}".replace(" Fig ", " Fig. "),
            self.entry[name],
        )

    def __dir__(self) -> Iterable[str]:
        return [name for name in self.entry if "_" in name]


def differs(settings: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[str]:
    """The settings in which a run is not the paper's: `differs(table.settings, globals())` on a page.

    Where a setting is a list, the run's list must hold all its values and may hold more.
    """

    def same(theirs: Any, ours: Any) -> bool:
        if isinstance(theirs, list):
            return isinstance(ours, list | tuple) and all(
                value in ours for value in theirs
            )
        return theirs == ours

    return [
        name
        for name, theirs in settings.items()
        if name not in parameters or not same(theirs, parameters[name])
    ]


_FAST = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # where PyYAML was built with it: a tenth of the time
_PAPERS = yaml.load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), _FAST
)
kirsch, lora, sve, hydra, regrad = (
    Paper(_PAPERS[name]) for name in ("kirsch", "lora", "sve", "hydra", "regrad")
)


door.room(__name__)
