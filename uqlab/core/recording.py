"""What a notebook records: numbers, tables, captions and claims, in results.json."""

import csv
import json
import math
import os
import platform
import re
import statistics
import sys
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uqlab.core.extras import extra
from uqlab.core.files import StrPath, Values, read_json, write

if TYPE_CHECKING:
    from pandas import DataFrame

# Tells a kernel its result folder, also where the notebook has no parameter output_dir.
FOLDER = "UQLAB_OUTPUT_DIR"
NOTHING = "–"  # in a table, where there is no value


@dataclass
class Claim:
    """A sentence that a reader could dispute, and whether it holds in a run.

    `margin` is how far the finding is from its bound, measured in `unit`; `paper` has
    `holds` and `text`.
    `algebra` marks what holds by definition, `other_runs` what is said of other runs,
    and `seeds` in how many other seeds the sentence holds, and of how many.
    """

    sentence: str = ""
    holds: bool = False
    margin: float | int | None = None
    unit: str = ""
    paper: Values | None = None
    algebra: bool = False
    other_runs: bool = False
    seeds: list[int] | None = None

    def row(self) -> tuple[str, ...]:
        """Return the sentence, the result, other seeds, margin and paper as text.

        What the result says stands in the docstring of `claims`.
        """
        result, seeds, margin, paper = "holds", NOTHING, NOTHING, NOTHING
        if self.seeds:
            held, count = self.seeds
            seeds = f"{held} of {count}"
            result = ("clear", "narrow", "unsettled")[min(count - held, 2)]
        if self.other_runs:
            seeds = "other runs"
        if not self.holds:
            result = "fails"
        elif self.algebra:
            result = "algebra"
        if self.margin is not None:
            margin = f"{self.margin:.3f}" + (f" ({self.unit})" if self.unit else "")
        if self.paper:
            paper = f"{'yes' if self.paper['holds'] else 'no'} ({self.paper['text']})"
        return self.sentence, result, seeds, margin, paper


@dataclass
class Record:
    """The content of results.json."""

    numbers: Values = field(default_factory=dict)
    tables: dict[str, Values] = field(default_factory=dict)
    figures: dict[str, Values] = field(default_factory=dict)
    claims: dict[str, Any] = field(default_factory=dict)  # a Claim each
    device: str | None = None

    @classmethod
    def read(cls, folder: StrPath) -> "Record":
        """Read results.json of a folder; an absent or broken file is empty."""
        record = cls(**known(cls, read_json(Path(folder, "results.json"))))
        claims = record.claims.items()
        record.claims = {name: Claim(**known(Claim, made)) for name, made in claims}
        return record


def known(kind: type, content: Values) -> Values:
    """Return those entries that are fields of a dataclass, of whatever version."""
    names = {entry.name for entry in fields(kind)}
    return {name: value for name, value in content.items() if name in names}


_folder: Path | None = None
_real = Path()  # the committed long runs of the same notebook, if there are some
_seeds = Path()  # the table of its claims with other seeds, by tools/seeds.py
_record = Record()


def begin(output_dir: StrPath, notebook: str) -> Path:
    """Make the folder that takes a notebook's figures and numbers, and return it.

    What was recorded before is forgotten.

    Parameters
    ----------
    output_dir
        The notebook's parameter of that name. If it is empty, the runner's folder is
        taken, or figures/interactive/<notebook>.
    notebook
        The notebook's name without .ipynb. A study "03_name_study" shares the committed
        long runs of its lesson, figures/real/03_name.
    """
    global _folder, _real, _seeds, _record
    figures = project(Path.cwd()) / "figures"
    folder = output_dir or os.environ.get(FOLDER) or figures / "interactive" / notebook
    _folder = Path(folder).absolute()
    _real = figures / "real" / notebook.removesuffix("_study")
    _seeds = figures / "seeds" / f"{notebook}.csv"
    _folder.mkdir(parents=True, exist_ok=True)
    _record = Record(device=_processor())
    _save()
    return _folder


def project(here: Path) -> Path:
    """Return the folder above notebooks/ and the folders in it, else the same."""
    if here.name in ("studies", "rows"):
        here = here.parent
    return here.parent if here.name == "notebooks" else here


def output_dir() -> Path:
    """Return the folder of the current notebook's figures and numbers."""
    return _folder or begin("", "untitled")


def record(name: str, value: Any, *, allow_nan: bool = False) -> Any:
    """Record a number, text, list, dict or DataFrame, and return it for display.

    NumPy, torch and pandas values become plain JSON. Missing cells of a table are
    null. Any other NaN or infinity is refused, because a finding that is not a number
    is a mistake, unless `allow_nan` stores it as null.

    Raises
    ------
    ValueError
        A number is not finite.
    TypeError
        The value is not data.
    """
    output_dir()
    data, kept = value, _record.numbers
    if hasattr(value, "notna"):  # of pandas
        frame = value.to_frame() if value.ndim == 1 else value
        data = frame.astype(object).where(frame.notna(), None).to_dict("split")
        kept = _record.tables
    data = plain(name, data, allow_nan)
    _record.numbers.pop(name, None)
    _record.tables.pop(name, None)
    kept[name] = data
    _save()
    return value


def claim(
    name: str,
    sentence: str,
    holds: Any,
    *,
    margin: Any = None,
    unit: str = "",
    paper: Any = None,
    algebra: bool = False,
    other_runs: bool = False,
) -> bool:
    """Record a sentence that a reader could dispute; return whether it holds here.

    Parameters
    ----------
    name
        The claim's key in results.json.
    sentence
        What is claimed.
    holds
        Whether it holds in this run: a bool, also of NumPy or torch.
    margin
        How far the finding is from its bound.
    unit
        The margin's unit, and how it is measured: "nats, low end of the interval".
    paper
        Whether the sentence holds in the paper, from `uqlab.study.published`, or None
        where the paper says nothing.
    algebra
        Whether the sentence holds by definition. It is then shown so, and not counted
        among the findings.
    other_runs
        Whether the sentence is about other runs, such as committed ones, which have
        their own seeds. No other seed of this run can then tell more of it.

    Raises
    ------
    TypeError, ValueError
        No sentence, `holds` neither true nor false, a margin that is not finite, or a
        name that this run has claimed with another sentence.
    """
    if not sentence.strip():
        raise ValueError(f"claim {name}: the sentence is {sentence!r}")
    holds = plain(name, holds)
    margin = plain(f"the margin of {name}", margin)
    if not isinstance(holds, bool):
        raise TypeError(f"claim {name}: holds is {holds!r}, neither true nor false")
    if not isinstance(margin, int | float | None) or isinstance(margin, bool):
        raise TypeError(f"claim {name}: the margin is {margin!r}, not a number")
    if paper is not None and not hasattr(paper, "_asdict"):
        raise TypeError(f"claim {name}: paper is {paper!r}; see uqlab.study.published")
    output_dir()
    if _record.claims.get(name, Claim(sentence)).sentence != sentence:
        raise ValueError(
            f"this run has claimed {name} with another sentence; take another name"
        )
    _record.claims[name] = Claim(
        sentence,
        holds,
        margin,
        unit,
        plain(name, paper),
        algebra,
        other_runs,
        seeds=_in_other_seeds(name, sentence),
    )
    _save()
    return holds


def claims() -> "DataFrame":
    """Return the claims of this run, a row each, for the page's closing table.

    The result is "clear", "narrow" where the claim fails in one of the other seeds in
    figures/seeds, "unsettled" where it fails in more, "fails", or "algebra"; without
    such seeds "holds" or "fails". Where figures/real holds long runs of the page, a
    column says in how many seeds the claim holds there, on which data set and with
    which version of uqlab. Where those runs made the claim in other words, because they
    had other widths or data, it quotes them. A further column counts runs on sentences.
    """
    with extra("notebooks"):
        import pandas

    # A lesson and its study share the folder, but not all claims.
    texts = _held(_table(_real / "sentences.csv"), _seeds.stem)
    long, rows = _long_runs(), []
    for name, claim in _record.claims.items():
        *found, paper = claim.row()
        held, sentence = long.get(name, (NOTHING, claim.sentence))
        if sentence != claim.sentence:
            held += f": “{sentence}”"
        rows.append((*found, held, texts.get(name, NOTHING), paper))
    names = ["claim", "this run", "other seeds", "margin", "`real` run", "sentences"]
    frame = pandas.DataFrame(rows, columns=[*names, "paper"]).set_index("claim")
    told = ["other seeds", "`real` run", "sentences"]
    return frame.drop(columns=[c for c in told if set(frame[c]) <= {NOTHING}])


def _long_runs() -> dict[str, tuple[str, str]]:
    """Return how each claim of the committed long runs ended, and its sentence."""
    about, made = read_json(_real / "manifest.json"), Record.read(_real).claims
    dataset = about.get("parameters", {}).get("dataset")
    where = (f", {dataset}" if dataset else "") + f", uqlab {about.get('uqlab')}"
    return {
        # Earlier runs said in the sentence how the margin is measured.
        name: (held + where, made[name].sentence.partition(" (margin: ")[0])
        for name, held in _held(_table(_real / "table.csv")).items()
        if name in made
    }


def committed(name: str, form: str = ".3f") -> str:
    """Return mean ± standard deviation of a number over the committed long runs.

    The dash "–" stands for a number that they did not record.
    """
    rows = _table(_real / "table.csv")
    values = [float(row[name]) for row in rows if row.get(name)]
    if not values:
        return NOTHING
    spread = [f"{statistics.stdev(values):{form}}"] if len(values) > 1 else []
    return " ± ".join([f"{statistics.mean(values):{form}}", *spread])


def _table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of runs, one a seed; none if the file is missing."""
    with suppress(OSError), path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
    return []


def _in_other_seeds(name: str, sentence: str) -> list[int] | None:
    """Return in how many of the other seeds a claim holds, and of how many.

    None where those runs made no such claim, or in other words: of other data.
    """
    for row in _table(_seeds):
        if (row["claim"], row["sentence"]) == (name, sentence):
            held = [row[seed] == "True" for seed in row if seed.isdigit()]
            return [sum(held), len(held)]
    return None


def _held(rows: list[dict[str, str]], notebook: str = "") -> dict[str, str]:
    """Return in how many runs of a table each claim holds, and of how many."""
    found = {}
    for row in rows:
        if not notebook or Path(row["run_notebook"]).stem == notebook:
            for column, value in row.items():
                if column.startswith("claim_") and value:
                    found.setdefault(column[6:], []).append(value == "True")
    return {name: f"{sum(held)} of {len(held)} seeds" for name, held in found.items()}


def describe_figure(name: str, caption: str = "", paper: str = "") -> None:
    """Note what a saved figure shows, and which figure of the paper it reproduces.

    `plots.save` calls this.
    """
    _record.figures[name] = {"caption": caption, "paper": paper}
    _save()


def plain(name: str, value: Any, allow_nan: bool = False) -> Any:
    """Return a value as JSON holds it: null, bool, int, float, str, list or dict.

    Named tuples, the results of `uqlab.metrics` and `uqlab.uncertainty`, are dicts.
    """
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif hasattr(value, "tolist"):  # NumPy and torch, scalars and arrays
        value = value.tolist()
    if isinstance(value, dict):
        return {
            str(key): plain(f"{name}.{key}", item, allow_nan)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain(f"{name}[{i}]", item, allow_nan) for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        if allow_nan:
            return None
        raise ValueError(
            f"{name} is {value}, which JSON cannot hold; leave it out, or "
            "record(..., allow_nan=True) stores it as null"
        )
    if isinstance(value, int | float | str | None):
        return value
    raise TypeError(
        f"{name} is a {type(value).__name__}; "
        "use numbers, text, lists, dicts, arrays, tensors or DataFrames"
    )


def _save() -> None:
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        _record.device = torch.cuda.get_device_name()
    text = json.dumps(vars(_record), indent=1, allow_nan=False, default=vars)
    write(output_dir() / "results.json", text)


def _processor() -> str:
    """Return the processor's name."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if model := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return model[1]
    return platform.processor() or platform.machine()
