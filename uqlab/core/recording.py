"""What a notebook records: numbers, tables, captions and claims, written to results.json in its folder as they come."""

import csv
import functools
import gc
import json
import math
import os
import platform
import re
import statistics
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uqlab.core.files import read_json, sha256, write

if TYPE_CHECKING:
    from pandas import DataFrame

FOLDER = "UQLAB_OUTPUT_DIR"  # tells a kernel its result folder, also where the notebook has no parameter output_dir
CODE = ".code.json"  # in that folder: the files of uqlab that the kernel has imported, with their checksums
_folder: Path | None = None
_real = (
    Path()
)  # the folder of the committed long run of the same notebook, if there is one
_results: dict[str, dict[str, Any]] = {
    "numbers": {},
    "tables": {},
    "figures": {},
    "claims": {},
}


def begin(output_dir: str | os.PathLike, notebook: str) -> Path:
    """Make the folder that takes this notebook's figures and numbers, forget earlier records, and return the folder.

    output_dir: the notebook's parameter of that name; empty: the runner's folder, else
    figures/interactive/<notebook>.
    """
    global _folder, _real
    here = Path.cwd()
    figures = (here.parent if here.name == "notebooks" else here) / "figures"
    _folder = Path(
        output_dir or os.environ.get(FOLDER) or figures / "interactive" / notebook
    ).absolute()
    _real = figures / "real" / notebook
    _folder.mkdir(parents=True, exist_ok=True)
    _results.update(numbers={}, tables={}, figures={}, claims={})
    _write_results()
    return _folder


def output_dir() -> Path:
    """Return the folder of the current notebook's figures and numbers."""
    return _folder or begin("", "untitled")


def record(name: str, value: Any, *, allow_nan: bool = False) -> Any:
    """Record a number, text, list, dict or DataFrame under a name in results.json, and return it for display.

    NumPy, torch and pandas values become plain JSON. Missing cells of a table are null;
    any other NaN or infinity is refused, because a finding that is not a number is a
    mistake, unless `allow_nan` stores it as null. Raises ValueError (not finite) or
    TypeError (not data), naming the record.
    """
    _check_name(name)
    if not isinstance(allow_nan, bool):
        raise TypeError(f"allow_nan must be True or False, got {allow_nan!r}")
    output_dir()
    pandas = sys.modules.get("pandas")
    if pandas and isinstance(value, pandas.DataFrame | pandas.Series):
        frame = pandas.DataFrame(value)
        split = frame.astype(object).where(frame.notna(), None).to_dict("split")
        names = [str(name or "") for name in frame.index.names]
        kind, data = (
            "tables",
            plain(
                name, split | ({"index_names": names} if any(names) else {}), allow_nan
            ),
        )
    else:
        kind, data = "numbers", plain(name, value, allow_nan)
    for each in ("numbers", "tables"):
        _results[each].pop(name, None)
    _results[kind][name] = data
    _write_results()
    return value


def claim(
    name: str, sentence: str, holds: Any, *, margin: Any = None, paper: Any = None
) -> bool:
    """Record under a name a sentence that a reader could dispute, and return whether it holds in this run.

    margin: how far the finding is from its bound, a number; the sentence or the page says how it is measured.
    paper: whether the sentence holds in the paper, from `uqlab.study.published`, or None where it says nothing.
    Raises TypeError or ValueError: no sentence, `holds` neither true nor false, a margin that is not finite, or a name
    that this run has claimed with another sentence.
    """
    _check_name(name)
    if not (isinstance(sentence, str) and sentence.strip()):
        raise ValueError(f"claim {name}: the sentence is {sentence!r}")
    holds, margin = plain(name, holds), plain(f"the margin of {name}", margin)
    if not isinstance(holds, bool):
        raise TypeError(f"claim {name}: holds is {holds!r}, neither true nor false")
    if not isinstance(margin, int | float | None) or isinstance(margin, bool):
        raise TypeError(f"claim {name}: the margin is {margin!r}, not a number")
    if paper is not None and not hasattr(paper, "_asdict"):
        raise TypeError(
            f"claim {name}: paper is {paper!r}; look it up, published.kirsch.table_2.says(dataset, rule)"
        )
    output_dir()
    if _results["claims"].get(name, {}).get("sentence", sentence) != sentence:
        raise ValueError(
            f"this run has claimed {name} with another sentence; take another name, or begin anew"
        )
    _results["claims"][name] = {
        "sentence": sentence,
        "holds": holds,
        "margin": margin,
        "paper": plain(name, paper),
    }
    _write_results()
    return holds


def claims() -> "DataFrame":
    """The claims of this run in their order, a row for each sentence, for the page's closing table.

    Where figures/real holds a long run of the page, a column says whether the claim
    holds there, or in how many seeds.
    """
    import pandas

    found, says = _results["claims"].values(), {True: "yes", False: "no"}
    theirs = [
        f"{says[c['paper']['holds']]} ({c['paper']['text']})" if c["paper"] else "–"
        for c in found
    ]
    margins = ["–" if c["margin"] is None else float(c["margin"]) for c in found]
    columns = {"this run": [says[c["holds"]] for c in found], "margin": margins}
    if long := _of_real_runs():
        columns["`real` run"] = [long.get(name, "–") for name in _results["claims"]]
    columns["paper"] = theirs
    index = pandas.Index([c["sentence"] for c in found], name="claim")
    return pandas.DataFrame(columns, index)


def committed(name: str, form: str = ".3f") -> str:
    """What the committed long runs of this page recorded as a number: mean ± standard deviation over seeds, or "–"."""
    found = [float(row[name]) for row in _real_table() if row.get(name)]
    spread = f" ± {statistics.stdev(found):{form}}" if len(found) > 1 else ""
    return f"{statistics.mean(found):{form}}{spread}" if found else "–"


def _real_table() -> list[dict[str, str]]:
    """The table of the committed long runs of this page, a row a seed; empty where there is none."""
    with suppress(OSError), (_real / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))
    return []


def _of_real_runs() -> dict[str, str]:
    """What the committed long runs of this page say of its claims: yes, no, or in how many of several seeds."""
    if rows := _real_table():
        names = [name for name in rows[0] if name.startswith("claim_")]
        held = {
            name: [row[name] == "True" for row in rows if row[name]] for name in names
        }
        return {
            name.removeprefix("claim_"): f"{sum(all_)} of {len(all_)} seeds"
            for name, all_ in held.items()
        }
    found = read_json(_real / "results.json").get("claims", {})
    return {name: "yes" if claim["holds"] else "no" for name, claim in found.items()}


def describe_figure(name: str, caption: str = "", paper: str = "") -> None:
    """Note what a saved figure shows, and which figure of the paper it reproduces; `plots.save` calls this."""
    for text in (name, caption, paper):
        _check_name(text)
    files = sorted(path.name for path in output_dir().iterdir() if path.stem == name)
    _results["figures"][name] = {"caption": caption, "paper": paper, "files": files}
    _write_results()


def watch_imports() -> None:
    """Start to record, and note in CODE after every cell of this kernel which files of uqlab it has imported.

    The runner moves them to the manifest, which says by them whether the code of a run
    has changed since.
    """
    from IPython.core.interactiveshell import InteractiveShell

    path, package = begin("", "") / CODE, Path(__file__).parents[1]
    imported: dict[str, str] = {}
    frozen = False  # noted here: to ask gc how much is frozen takes a twentieth of a second, after every cell

    def note(*_: Any) -> None:
        nonlocal frozen
        if not frozen and "torch" in sys.modules:
            gc.freeze()  # garbage collections, of which a figure triggers many, need not look at what imports made
            frozen = True
        modules = [
            module
            for name, module in sys.modules.copy().items()
            if f"{name}.".startswith("uqlab.")
        ]
        files = {getattr(module, "__file__", None) for module in modules}
        names = {Path(file).relative_to(package).as_posix() for file in files if file}
        if new := sorted(names - imported.keys()):
            imported.update((name, sha256(package / name)) for name in new)
            write(path, json.dumps(imported))

    InteractiveShell.instance().events.register("post_run_cell", note)


def plain(name: str, value: Any, allow_nan: bool = False) -> Any:
    """Return a value as JSON holds it: null, bool, int, float, str, list or dict."""
    if hasattr(
        value, "_asdict"
    ):  # named tuples, the results of uqlab.metrics and uqlab.uncertainty
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
            f"{name} is {value}, which JSON cannot hold; record(..., allow_nan=True) stores it as null"
        )
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value).__name__
    raise TypeError(
        f"{name} is a {kind}; use numbers, text, lists, dicts, arrays, tensors or DataFrames"
    )


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f"what a record is called must be text, got {name!r} ({type(name).__name__})"
        )


def _write_results() -> None:
    torch = sys.modules.get("torch")
    device = (
        torch.cuda.get_device_name()
        if torch and torch.cuda.is_initialized()
        else _processor()
    )
    write(
        output_dir() / "results.json",
        json.dumps({**_results, "device": device}, indent=1, allow_nan=False),
    )


@functools.cache
def _processor() -> str:
    with suppress(OSError):
        found = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
        if found:
            return found[1]
    return platform.processor() or platform.machine()
