"""Notebooks by name, and their parameters: data and never code."""

import ast
import difflib
import functools
import itertools
import json
import operator
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from uqlab.core.files import StrPath, Values, fingerprint, read_json, write
from uqlab.core.recording import plain, project

PACKED = Path(__file__).absolute().with_name("project")  # in a wheel: setup.py
PROJECT = PACKED if PACKED.is_dir() else PACKED.parents[2]  # what `uqlab new` copies
PAGES = PROJECT / "notebooks"
KINDS = {
    "lessons": "[0-9]*.ipynb",
    "studies": "studies/*.ipynb",
    "rows": "rows/*.ipynb",
}
DATA_FILE = r"\.(?:npz|[tc]sv(?:\.gz)?)"  # how the path of a user's own data ends
_SOLUTION = re.compile(r"^( *)### BEGIN SOLUTION$.*?### END SOLUTION$", re.S | re.M)

# What a parameter may be -------------------------------------------------------------

Rule = Any  # the least of a count, an interval, choices, a list of a rule, or any type

# A name means the same in every notebook, so one table holds for all of them.
RULES: dict[str, Rule] = {
    "asked evaluated limit limit_ood seed shifted train_limit warmup": 0,
    "batch_size blind_draws copies draws ensemble_size epochs epochs_own epochs_tuned "
    "example_epochs grid_steps held_out jobs k laplace_members map_side mask_batch "
    "mask_steps passes patch perturbations quantiles rank ranked remove repeats "
    "resamples rounds samples shuffles side top tuned_steps": 1,
    "folds groups mask_members members points splits": 2,
    "gain lr lr_adapters lr_batch lr_biases lr_knobs lr_sve mask_lr width": "(0, inf)",
    "decay_sve diversity init_std noise sigma weight_decay": "[0, inf)",
    "dropout momentum": "[0, 1)",
    "enough threshold": "(0, 1]",
    "confidence level mixed risk": "(0, 1)",
    "precision": ("float32", "bfloat16"),
    "scheduler": ("constant", "cosine", "step"),
    "counts epochs_first grid_samples milestones ranks removed sizes stages "
    "tile_sizes": [1],
    "seeds": [0, 0],
    "gains grid_widths input_std other_widths prior_variances widths": ["(0, inf)"],
    "weights_swept": ["[0, inf)"],
    "ood pretrained": [str],
}
RULES = {name: rule for names, rule in RULES.items() for name in names.split()}
MAY_BE_EMPTY = {"input_std", "methods", "milestones", "tile_sizes"}
MAY_REPEAT = {
    "epochs_first",
    "input_mean",
    "input_std",
    "pretrained",
    "weights",
    "widths",
}


def check(parameters: Mapping[str, Any], **rules: Rule) -> None:
    """Raise ValueError, naming the parameter, unless a notebook's parameters are legal.

    What papermill has written below the parameters must be parameters of the notebook,
    and values of their types: papermill itself sets any name to anything.

    Parameters
    ----------
    parameters
        The notebook's `globals()`; names that have no rule are left alone.
    **rules
        What a parameter may be in this notebook alone: the least of a count, an
        interval like "(0, 1]", a tuple of choices, a list, or a type for no rule. Each
        item of a list must be what the rule's first one says, and there must be as many
        different ones as the rule has items.
    """
    known: Values = {}
    for cell in parameters.get("In", ()):  # what this kernel has run
        with suppress(SyntaxError, ValueError):
            assigned = _literals(cell)
            if cell.startswith("# Parameters\n"):
                break
            known |= assigned
    else:
        assigned = {}
    refuse_unknown(assigned, known, "this notebook")
    for name, value in assigned.items():
        _of_type(
            f"papermill takes lists and mappings by -y: {name}", known[name], value
        )
    rules = RULES | rules
    for name in rules.keys() & parameters:
        if not isinstance(parameters[name], ModuleType):  # `methods` is also a module
            _check_rule(name, rules[name], parameters[name])


def _check_rule(name: str, rule: Rule, value: Any) -> None:
    """Raise ValueError, naming the parameter, unless its value is what a rule says."""
    number = isinstance(value, int | float)
    fits, wanted = True, ""
    match rule:
        case int():
            fits, wanted = isinstance(value, int) and value >= rule, "an integer >="
        case str():
            low, high = map(float, rule[1:-1].split(","))
            above = operator.gt if rule[0] == "(" else operator.ge
            below = operator.lt if rule[-1] == ")" else operator.le
            fits, wanted = number and above(value, low) and below(value, high), "in"
        case tuple():
            fits, wanted = value in rule, "one of"
        case list():
            fits, wanted = _fits(name, rule, value), "a list of different values, as"
    if not fits:
        raise ValueError(f"{name} must be {wanted} {rule}, got {value!r}")


def _fits(name: str, rule: list[Rule], values: Any) -> bool:
    """Return whether a list has enough different items, each as its rule says."""
    if not isinstance(values, list | tuple | range):
        return False
    for place, item in enumerate(values):
        _check_rule(f"{name}[{place}]", rule[0], item)
    different = len(set(values))
    alike = different < len(values) and name not in MAY_REPEAT
    empty = not values and name in MAY_BE_EMPTY
    return empty or (different >= len(rule) and not alike)


# Notebooks and their cells -----------------------------------------------------------


def find(name: StrPath) -> Path:
    """Return the notebook of a path, a stem or a unique start of one ("03").

    A lesson comes before a study of the same number; "studies/03" is the study. The
    package's own come after all in notebooks/ of this folder.
    """
    if Path(name).is_file():
        return Path(name).absolute()
    folder, _, stem = str(name).removesuffix(".ipynb").rpartition("/")
    for place, pattern in itertools.product((_own_folder(), PAGES), KINDS.values()):
        paths = [path for path in place.glob(pattern) if path.stem.startswith(stem)]
        paths = [path for path in paths if folder in ("", path.parent.name)]
        paths = [path for path in paths if path.stem == stem] or sorted(paths)
        if paths:
            break
    if len(paths) == 1:
        return paths[0]
    names = ", ".join(path.stem for path in paths or all_notebooks())
    raise ValueError(f"'{name}' is not the start of one notebook's name, of: {names}")


def all_notebooks(kind: str = "lessons") -> list[Path]:
    """Return the lessons in notebooks/ of this folder, else those of the package.

    Studies hold the evidence behind the lessons; "rows" are batch notebooks that fill,
    in hours, the studies' tables.
    """
    own = any(_own_folder().glob(KINDS["lessons"]))
    return sorted((_own_folder() if own else PAGES).glob(KINDS[kind]))


def _own_folder() -> Path:
    return project(Path.cwd()) / "notebooks"


def new_project(folder: Path, student: bool = False) -> None:
    """Write the notebooks, their profiles and the committed runs into an empty folder.

    For a student the functions under "Your turn" are left to be written.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds files; name another, new or empty folder")
    left_out = shutil.ignore_patterns("*.sweep", ".*", "__pycache__")
    for part in ("notebooks", "figures/real"):
        shutil.copytree(PROJECT / part, folder / part, ignore=left_out)
    (folder / "data").mkdir()
    shutil.copy(PROJECT / "data" / "README.md", folder / "data")
    shutil.copy(PACKED.with_suffix(".md"), folder / "README.md")
    for page in folder.glob("notebooks/[0-9]*.ipynb") if student else ():
        notebook = read_json(page)
        for cell in notebook["cells"]:  # tagged as nbgrader has it
            if "your-turn" in cell["metadata"].get("tags", []):
                blank = r'\1raise NotImplementedError("your turn")'
                text = _SOLUTION.sub(blank, "".join(cell["source"]))
                cell["source"] = text.splitlines(keepends=True)
        write(page, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def cells(notebook: StrPath) -> list[Values]:
    """Return the cells of a notebook; raises ValueError for any other file."""
    read = read_json(Path(notebook)).get("cells")
    needed = {"cell_type", "metadata", "source"}
    if not isinstance(read, list) or not all(cell.keys() >= needed for cell in read):
        raise ValueError(
            f"{notebook} is not a notebook of format 4 (JSON in UTF-8, without a "
            f"byte-order mark), whose cells have {', '.join(sorted(needed))}"
        )
    return read


def source_sha256(notebook: StrPath) -> str:
    """Return the checksum of the sources and tags of a notebook's cells."""
    return fingerprint(
        [
            [c["cell_type"], "".join(c["source"]), c["metadata"].get("tags", [])]
            for c in cells(notebook)
        ]
    )


def defaults(notebook: StrPath) -> Values:
    """Read a notebook's parameters from its cell tagged so, without running it."""
    source = ""
    for cell in cells(notebook):
        if "parameters" in cell["metadata"].get("tags", []):
            source += "".join(cell["source"]) + "\n"
    try:
        return _literals(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"{Path(notebook).name}: the parameters cell holds only lines "
            "`name = literal  # meaning`; derived values go into the next cell; "
            f"found\n{source}"
        ) from error


def _literals(source: str) -> Values:
    """Return the names and values of lines `name = literal`."""
    values = {}
    for line in ast.parse(source).body:
        match line:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                values[name] = ast.literal_eval(value)
            case _:
                raise ValueError("a line is not `name = literal`")
    return values


def profiles(notebook: Path) -> dict[str, dict[str, Values]]:
    """Read profiles.yaml of a notebook: profile, notebook, parameter, value.

    It lies beside the lessons, and in the folder above the studies and rows.
    """
    folder = notebook.parent
    path = (folder.parent if folder.name in KINDS else folder) / "profiles.yaml"
    try:
        sets = _load_yaml(path.read_text("utf-8")) if path.is_file() else {}
        sets = {profile: {**entries} for profile, entries in sets.items()}
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} must map profile -> notebook -> {{parameter: value}}: {error}"
        ) from error
    return sets


_load_yaml = functools.lru_cache(yaml.safe_load)  # all notebooks of a folder share it


# Parameters that are given -----------------------------------------------------------


def overrides(
    notebook: Path, profile: str = "quick", changes: Values | None = None
) -> Values:
    """Return the parameters of a profile, and on top of them the changes.

    Text is read as data of the default's type (a Python literal, YAML's true or [a, b])
    and never evaluated.

    Raises
    ------
    ValueError
        For an unknown profile or parameter, and a value of a type not the default's.
    """
    sets, stem = profiles(notebook), notebook.stem
    has = ["quick", *(name for name in sets if stem in sets[name])]
    if profile not in has:
        raise ValueError(f"{stem} has no profile {profile!r}; it has: {', '.join(has)}")
    values = sets.get(profile, {}).get(stem, {}) | (changes or {})
    return checked(values, defaults(notebook), stem)


def checked(parameters: Values, known: Values, where: str) -> Values:
    """Return given parameters as values of the types of the `known` defaults."""
    refuse_unknown(parameters, known, where)
    if "output_dir" in parameters:
        raise ValueError("output_dir is set by the runner; use --output-dir")
    values = {}
    for name, text in parameters.items():
        value = plain(name, meant(text, type(known[name])))
        values[name] = _of_type(f"{where}: parameter {name}", known[name], value)
    return values


def _of_type(name: str, default: Any, value: Any) -> Any:
    """Return a value of a default's type; JSON has no tuples, and None is any type."""
    kind = list if isinstance(default, tuple) else type(default)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind and default is not None:
        raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r}")
    return value


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ValueError, with the nearest name and all names, for an unknown one."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ";"
            names = ", ".join(known)
            raise ValueError(f"unknown parameter {name!r}{hint} {where} has: {names}")


def meant(text: Any, kind: type = object) -> Any:
    """Return the data that a text means, or the text where text is meant."""
    if not isinstance(text, str) or kind is str:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        with suppress(yaml.YAMLError, RecursionError):
            loaded = yaml.safe_load(text)  # its other readings (1:30, 1e-3) surprise
            if isinstance(loaded, bool | list | dict | None):
                return loaded
    return text


def from_here(text: str) -> str:
    """Make paths of existing data files absolute: kernels run in another folder."""

    def absolute(match):
        path = Path(match[0])
        return path.absolute().as_posix() if path.is_file() else match[0]

    return re.sub(
        rf"""[^\s'"\[\],][^'"\[\],]*{DATA_FILE}(?=['"\[\],\s]|$)""", absolute, text
    )
