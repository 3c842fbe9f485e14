"""Notebooks by name, and their parameters: data and never code."""

import ast
import functools
import itertools
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import yaml

from uqlab.core.files import StrPath, Values, fingerprint, read_json
from uqlab.core.recording import plain, project

PACKED = Path(__file__).absolute().with_name("project")  # in a wheel: setup.py
PROJECT = PACKED if PACKED.is_dir() else PACKED.parents[2]  # what `uqlab new` copies
PAGES = PROJECT / "notebooks"
KINDS = {
    "lessons": "[0-9]*.ipynb",
    "studies": "studies/*.ipynb",
    "rows": "rows/*.ipynb",
}

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
        try:
            assigned = _literals(cell)
        except (SyntaxError, ValueError):
            continue
        if cell.startswith("# Parameters\n"):
            _of_types(assigned, known, "this notebook (papermill takes lists by -y)")
            break
        known |= assigned
    for name, rule in (RULES | rules).items():
        value = parameters.get(name)
        if name in parameters and not isinstance(value, ModuleType):  # `methods`
            _check_rule(name, rule, value)


def _check_rule(name: str, rule: Rule, value: Any) -> None:
    """Raise ValueError, naming the parameter, unless its value is what a rule says."""
    fits, wanted = True, ""
    match rule:
        case int():
            fits, wanted = isinstance(value, int) and value >= rule, "an integer >="
        case str():
            fits, wanted = isinstance(value, int | float), "in"
            low, high = map(float, rule[1:-1].split(","))
            open_ends = {low: "(" in rule, high: ")" in rule}
            fits = fits and low <= value <= high and not open_ends.get(value)
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
    if different < len(values) and name not in MAY_REPEAT:
        return False
    return different >= len(rule) or (not values and name in MAY_BE_EMPTY)


# Notebooks and their cells -----------------------------------------------------------


def find(name: StrPath) -> Path:
    """Return the notebook of a path, a stem or a unique start of one ("03").

    A lesson comes before a study of the same number; "studies/03" is the study. The
    package's own come after all in notebooks/ of this folder.
    """
    if Path(name).is_file():
        return Path(name).absolute()
    asked = Path(str(name).removesuffix(".ipynb"))
    for place, pattern in itertools.product((_own_folder(), PAGES), KINDS.values()):
        paths = [p for p in sorted(place.glob(pattern)) if p.match(f"{asked}*")]
        paths = [p for p in paths if p.stem == asked.name] or paths
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


def cells(notebook: StrPath) -> list[Values]:
    """Return the cells of a notebook; raises ValueError for any other file."""
    read = read_json(Path(notebook)).get("cells")
    if not isinstance(read, list):
        raise ValueError(
            f"{notebook} is not a notebook of format 4: JSON in UTF-8 with `cells`, "
            "without a byte-order mark"
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
        return {
            profile: {name: {**(given or {})} for name, given in entries.items()}
            for profile, entries in sets.items()
        }
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} must map profile -> notebook -> {{parameter: value}}: {error}"
        ) from error


class _Yaml(yaml.SafeLoader):
    """YAML 1.2: in 1.1, 010 is 8, 1:30 is 90, no is False and 1e-3 is a text."""

    yaml_implicit_resolvers: ClassVar = {
        "<": yaml.SafeLoader.yaml_implicit_resolvers["<"]  # entries of an &anchor
    }


_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}


def _word(loader: _Yaml, node: yaml.ScalarNode) -> Any:
    """Return what a word without quotes means."""
    word = node.value.lower()
    if re.fullmatch(r"[-+]?\d+", word):
        return int(word)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", word):
        return float(word)
    return _WORDS.get(word, node.value)


_Yaml.add_implicit_resolver("!word", re.compile(""), None)
_Yaml.add_constructor("!word", _word)


@functools.lru_cache  # all notebooks of a folder share it
def _load_yaml(text: str) -> Any:
    return yaml.load(text, _Yaml)


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
        others = [name for name in sets.get(profile, ()) if name[:2] == stem[:2]]
        way = "".join(
            f"\n{n} has it: uqlab run {n} --profile {profile}" for n in others
        )
        known = f"it has: {', '.join(has)}"
        raise ValueError(f"{stem} has no profile {profile!r}; {known}{way}")
    values = sets.get(profile, {}).get(stem, {}) | (changes or {})
    return checked(values, defaults(notebook), stem)


def checked(parameters: Values, known: Values, where: str) -> Values:
    """Return given parameters as values of the types of the `known` defaults."""
    if "output_dir" in parameters:
        raise ValueError("output_dir is set by the runner; use --output-dir")
    values = {n: meant(v, type(known.get(n))) for n, v in parameters.items()}
    return _of_types(plain(where, values), known, where)


def _of_types(values: Values, known: Values, where: str) -> Values:
    """Return values of the defaults' types; JSON has no tuples, and None is any type.

    Raises ValueError for a name that is not known and a value of another type.
    """
    values = {**values}
    for name, value in values.items():
        if name not in known:
            has = ", ".join(known) or "none, as no cell is tagged `parameters`"
            raise ValueError(f"unknown parameter {name!r}; {where} has: {has}")
        default = known[name]
        kind = list if isinstance(default, tuple) else type(default)
        if kind is float and type(value) is int:
            values[name] = float(value)
        elif default is not None and type(value) is not kind:
            wanted = f"{name} must be of type {kind.__name__}, as {default!r}"
            raise ValueError(f"{where}: parameter {wanted}, got {value!r}")
    return values


def meant(text: Any, kind: type = object) -> Any:
    """Return the data that a text means, or the text where text is meant."""
    if not isinstance(text, str) or kind is str:
        return text
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    with suppress(yaml.YAMLError, RecursionError):
        loaded = _load_yaml(text)
        return text if isinstance(loaded, str) else loaded
    return text
