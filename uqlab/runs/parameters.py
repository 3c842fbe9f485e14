"""Notebooks by name, and their parameters: data and never code, checked by pydantic."""

import ast
import codecs
import difflib
import functools
import itertools
import json
import re
import shutil
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import click
import yaml
from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    NonNegativeInt,
    Strict,
    TypeAdapter,
    ValidationError,
    with_config,
)
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from uqlab.core.files import StrPath, Values, fingerprint, read_json, write
from uqlab.core.recording import plain, project

CELL = {"cell_type", "metadata", "source"}  # what every cell of a notebook has
PACKED = Path(__file__).absolute().with_name("project")  # in a wheel: setup.py
PROJECT = PACKED if PACKED.is_dir() else PACKED.parents[2]  # what `uqlab new` copies
PAGES = PROJECT / "notebooks"
KINDS = ("lessons", "studies", "rows")
KEY = re.compile(r"^( *)### BEGIN SOLUTION$.*?### END SOLUTION$", re.S | re.M)
BLANK = r'\1raise NotImplementedError("your turn")'
DATA_FILE = r"\.(?:npz|[tc]sv(?:\.gz)?)"  # how the path of a user's own data ends
PARSING = threading.Lock()  # Python 3.11 counts the depth of all threads' trees as one
PROFILES = TypeAdapter(dict[str, dict[str, dict[str, JsonValue]]])

# What a parameter may be -------------------------------------------------------------

Rule = Any  # the least of a count, an interval, choices, a type, or a list of a rule
MOST = 10**7  # of a count
ENOUGH = 10  # inputs: fewer show nothing, unless 0 asks for all


def _all_or_enough(value: int) -> int:
    if 0 < value < ENOUGH:
        raise ValueError(f"must be at least {ENOUGH}, or 0 where a page takes all")
    return value


# A name means the same on every page, so one table says for all of them what it may be.
RULES: dict[str, Rule] = {
    "limit train_limit": Annotated[int, Field(ge=0), AfterValidator(_all_or_enough)],
    "seed": NonNegativeInt,  # of up to 63 bits
    "asked evaluated limit_ood shifted warmup": 0,
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
    "depth": float,
    "precision": ("float32", "bfloat16"),
    "scheduler": ("constant", "cosine", "step"),
    "augment falls mask_inputs tune_mlp": bool,
    "grid own settings": dict,
    "ablations alarm ambiguous backbone board by checkpoint chosen_on cost dataset "
    "device later logits long_runs model observatory older output_dir over page "
    "page_profile pretrained_on prompt quality replicate root series shown study sweep "
    "trained unknown watch": str,
    "counts epochs_first grid_samples milestones ranks removed sizes stages "
    "tile_sizes": [1],
    "seeds": [NonNegativeInt] * 2,
    "gains grid_widths input_std other_widths prior_variances widths": ["(0, inf)"],
    "input_mean": [float],
    "weights_swept": ["[0, inf)"],
    "baselines gradients methods ood near pretrained scores weights": [str],
}
RULES = {name: rule for names, rule in RULES.items() for name in names.split()}
MAY_REPEAT = {
    "epochs_first", "input_mean", "input_std", "pretrained", "weights", "widths",
}  # fmt: skip
MAY_BE_EMPTY = {
    "baselines", "gradients", "input_mean", "input_std", "methods", "milestones",
    "near", "scores", "tile_sizes", "weights",
}  # fmt: skip


def check(parameters: Mapping[str, Any], **rules: Rule) -> None:
    """Raise ValueError, naming the parameter, unless a page's parameters are legal.

    What papermill has written below the parameters must be parameters of the page, and
    values of their types: papermill itself sets any name to anything.

    Parameters
    ----------
    parameters
        The page's `globals()`; names that are no parameters of any page are left alone.
    **rules
        What a parameter may be on this page alone: the least of a count, an interval
        like "(0, 1]", a tuple of choices, a type, or a list. Each item of a list must
        be what the rule's first one says, and there must be as many different ones as
        the rule has items.
    """
    _check_injected(parameters.get("In", ()))  # what this kernel has run
    kinds = {name: _kind(rule) for name, rule in (RULES | rules).items()}
    values = {
        name: value
        for name, value in parameters.items()
        if name in kinds
        and not isinstance(value, ModuleType)  # `methods` is also a room
    }
    _validated("", kinds, values)


def _check_injected(cells: Iterable[str]) -> None:
    """Check what papermill has assigned against the cells of parameters before it."""
    known = {}
    for cell in cells:
        try:
            given = _literals(cell)
        except (SyntaxError, ValueError):
            continue
        if cell.startswith("# Parameters\n"):
            refuse_unknown(given, known, "this page")
            _of_types("papermill takes lists and mappings by -y: ", known, given)
        known |= given


def _kind(rule: Rule) -> Any:
    """Return a rule as a type of pydantic."""
    match rule:
        case int():
            return Annotated[int, Field(ge=rule, le=MOST)]
        case str():
            low, high = map(float, rule[1:-1].split(","))
            above = Field(gt=low) if rule[0] == "(" else Field(ge=low)
            below = Field(lt=high) if rule[-1] == ")" else Field(le=high)
            return Annotated[float, above, below]
        case tuple():
            return Literal[rule]
        case list():
            return _several(_kind(rule[0]), len(rule))
    return rule


def _several(kind: Any, fewest: int) -> Any:
    """Return the type of lists with so many different values, none of them twice."""

    def check(values, info):
        name = info.field_name
        different = len(set(values))
        if different < len(values) and name not in MAY_REPEAT:
            raise ValueError("must have no value twice")
        if different < fewest and (values or name not in MAY_BE_EMPTY):
            raise ValueError(f"must have {fewest} different values or more")
        return values

    return Annotated[list[kind], Strict(False), AfterValidator(check)]  # or a range


def _validated(where: str, kinds: Values, values: Values) -> Values:
    """Return values of types by name; raise ValueError for the first that is wrong."""
    try:
        return _adapter(tuple(kinds.items())).validate_python(values)
    except ValidationError as error:
        raise ValueError(where + _reason(error)) from None


@functools.lru_cache  # a sweep checks every value of its grid
def _adapter(kinds: tuple[tuple[str, Any], ...]) -> TypeAdapter:
    model: Any = TypedDict("Parameters", dict(kinds), total=False)  # pyright: ignore
    return TypeAdapter(with_config(strict=True, allow_inf_nan=False)(model))


def _reason(error: ValidationError) -> str:
    """Return in a sentence what is wrong first, and what was given."""
    wrong = error.errors()[0]
    name, *index = wrong["loc"] or ("the file",)
    item = f"{index}" if index else ""
    rule = wrong["msg"].removeprefix("Value error, ")
    rule = rule.replace("Input should be", "must be")
    return f"{name}{item} {rule}, got {wrong['input']!r}"


# Notebooks and what stands in them ---------------------------------------------------


def find(name: StrPath) -> Path:
    """Return the notebook that a path, a stem or a unique start of one ("03") means.

    A lesson comes before a study of the same number; "studies/03" is the study. Those
    of the package come after all that lie in notebooks/ of this folder.
    """
    if Path(name).is_file():
        return Path(name).absolute()
    folder, _, stem = str(name).removesuffix(".ipynb").rpartition("/")
    every = []
    for pages, kind in itertools.product(_places(), KINDS):
        known = {path.stem: path for path in _notebooks(pages, kind)}
        every += known
        fitting = [stem] if stem in known else [s for s in known if s.startswith(stem)]
        if fitting and folder in ("", kind):
            if len(fitting) > 1:
                several = ", ".join(fitting)
                raise ValueError(f"'{name}' is the start of several: {several}")
            return known[fitting[0]]
    raise ValueError(f"'{name}' is no notebook of: {', '.join(every)}")


def all_notebooks(kind: str = "lessons") -> list[Path]:
    """Return the lessons in notebooks/ of this folder, else those of the package.

    Studies, which hold the evidence behind the lessons, are in notebooks/studies/; the
    notebooks of notebooks/rows/ are no pages: they fill, in hours, the studies' tables.
    """
    pages = next(place for place in _places() if _notebooks(place, "lessons"))
    return _notebooks(pages, kind)


def _places() -> tuple[Path, Path]:
    """Return notebooks/ of this folder, which may be one in it, and the package's."""
    return project(Path.cwd()) / "notebooks", PAGES


def _notebooks(pages: Path, kind: str) -> list[Path]:
    """Return the notebooks of a kind in a folder."""
    return sorted(
        pages.glob("[0-9]*.ipynb" if kind == "lessons" else f"{kind}/*.ipynb")
    )


def new_project(folder: Path, student: bool = False) -> None:
    """Write the pages, their profiles and the committed runs into an empty folder.

    For a student the functions under "Your turn" are left to be written.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} holds files, and a project starts in a new or empty folder; "
            "name another"
        )
    left_out = shutil.ignore_patterns("*.sweep", ".*", "__pycache__")
    for part in ("notebooks", "figures/real"):
        shutil.copytree(PROJECT / part, folder / part, ignore=left_out)
    (folder / "data").mkdir()
    shutil.copy(PROJECT / "data" / "README.md", folder / "data")
    shutil.copy(PACKED.with_suffix(".md"), folder / "README.md")
    if student:
        for page in folder.glob("notebooks/[0-9]*.ipynb"):
            leave_blank(page)


def leave_blank(page: Path) -> None:
    """Take the key out of a page's cells tagged `your-turn`, as nbgrader does."""
    notebook = read_json(page)
    for cell in notebook["cells"]:
        if "your-turn" in cell["metadata"].get("tags", []):
            text = KEY.sub(BLANK, "".join(cell["source"]))
            cell["source"] = text.splitlines(keepends=True)
    write(page, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def cells(notebook: StrPath) -> list[Values]:
    """Return the cells of a notebook; raises ValueError for any other file."""
    read = read_json(Path(notebook)).get("cells")
    if not isinstance(read, list) or not all(
        isinstance(cell, dict) and cell.keys() >= CELL for cell in read
    ):
        names = ", ".join(sorted(CELL))
        bom = Path(notebook).read_bytes().startswith(codecs.BOM_UTF8)
        marked = "; it starts with a byte-order mark: save it as UTF-8 without one"
        raise ValueError(
            f"{notebook} is not a notebook of format 4, whose cells have {names}"
            + marked * bom
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
    source = "\n".join(
        "".join(cell["source"])
        for cell in cells(notebook)
        if "parameters" in cell["metadata"].get("tags", [])
    )
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
    with PARSING:
        lines = ast.parse(source).body
    return dict(map(_assigned, lines))


def _assigned(line: ast.stmt) -> tuple[str, Any]:
    """Return the name and the value of a line `name = literal`."""
    match line:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
        ):
            return name, ast.literal_eval(value)
    raise ValueError("no line `name = literal`")


def profiles_file(notebook: Path) -> Path:
    """Return where the parameter sets of a notebook are."""
    folder = notebook.parent
    return (folder.parent if folder.name in KINDS[1:] else folder) / "profiles.yaml"


def profiles(notebook: Path) -> dict[str, dict[str, Values]]:
    """Read profiles.yaml of a notebook: profile, notebook, parameter, value.

    It lies beside the lessons, and in the folder above the studies and rows.
    """
    path = profiles_file(notebook)
    sets = {}
    try:
        if path.is_file():
            sets = _sets(path.read_text("utf-8"))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = _reason(error) if isinstance(error, ValidationError) else error
        raise ValueError(
            f"{path} must map profile -> notebook -> {{parameter: value}}: {reason}"
        ) from error
    return {"quick": {}} | sets


@functools.lru_cache  # of all notebooks of a folder
def _sets(text: str) -> dict[str, dict[str, Values]]:
    return PROFILES.validate_python(yaml.safe_load(text))


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
    known = defaults(notebook)
    values = of_profile(notebook, profile) | (changes or {})
    return checked(values, known, notebook.stem)


def in_profile(notebook: Path, profile: str) -> dict[str, Values]:
    """Return the entries of a profile; ValueError for one that is not there."""
    sets = profiles(notebook)
    if profile not in sets:
        file = profiles_file(notebook)
        names = ", ".join(sets)
        raise ValueError(f"unknown profile {profile!r}; {file} has: {names}")
    return sets[profile]


def of_profile(notebook: Path, profile: str) -> Values:
    """Return a profile's parameters of a notebook; every other than quick has some."""
    entries, stem = in_profile(notebook, profile), notebook.stem
    if profile != "quick" and stem not in entries:
        kin = [name for name in entries if name[:2] == stem[:2]] or [*entries]
        kin = [re.sub(r"^(\d\d)_.+_study$", r"studies/\1", name) for name in kin]
        then = f": uqlab run {kin[0]} --profile {profile}" if kin else ""
        have = f"{', '.join(kin) or 'no notebook'} has it{then}"
        raise ValueError(f"{stem} has no profile {profile!r}; only {have}")
    return entries.get(stem, {})


def checked(parameters: Values, known: Values, where: str) -> Values:
    """Return given parameters as values of the types of the `known` defaults."""
    refuse_unknown(parameters, known, where)
    if "output_dir" in parameters:
        raise ValueError("output_dir is set by the runner; use --output-dir")
    values = {
        name: plain(name, meant(text, type(known[name])))
        for name, text in parameters.items()
    }
    return _of_types(f"{where}: parameter ", known, values)


def _of_types(where: str, known: Values, values: Values) -> Values:
    """Return values of the types of the `known` defaults."""
    json = {tuple: list, type(None): Any}  # has no tuples; None may be anything
    types = {name: type(value) for name, value in known.items()}
    kinds = {name: json.get(kind, kind) for name, kind in types.items()}
    return _validated(where, kinds, values)


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ValueError, with the nearest name and all names, for an unknown one."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ";"
            names = ", ".join(known) or "no parameters"
            raise ValueError(f"unknown parameter {name!r}{hint} {where} has: {names}")


def meant(text: Any, kind: type = object) -> Any:
    """Return the data that a text means, or the text where text is meant."""
    if not isinstance(text, str):
        return text
    value = text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        with suppress(yaml.YAMLError, RecursionError):
            loaded = yaml.safe_load(text)  # its other readings (1:30, 1e-3) surprise
            if isinstance(loaded, bool | list | dict | None):
                value = loaded
    return text if kind is str and not isinstance(value, str) else value


def per_notebook(
    names: Iterable[str],
    profile: str,
    parameters: dict[str, str],
    kind: str = "lessons",
) -> dict[Path, Values]:
    """Return for each notebook its given parameters.

    By default for all of a kind that have the profile. All parameters are checked; each
    must be one of at least one of the notebooks. Where one lacks it, a note on the
    terminal says so.
    """
    paths = list(map(find, names)) or _with_profile(profile, kind)
    known = {path: defaults(path) for path in paths}
    if len({path.stem for path in known}) < len(known):
        same = ", ".join(map(str, known))
        raise ValueError(f"two notebooks of one name would share a folder: {same}")
    anywhere = dict.fromkeys(itertools.chain(*known.values()))
    refuse_unknown(parameters, anywhere, " and ".join(path.stem for path in known))
    plan = {}
    for path, values in known.items():
        plan[path] = {
            n: from_here(text) for n, text in parameters.items() if n in values
        }
        overrides(path, profile, plan[path])
        for name in sorted(parameters.keys() - values):
            click.echo(f"note: no parameter {name!r} in {path.stem}", err=True)
    return plan


def _with_profile(profile: str, kind: str) -> list[Path]:
    """Return the notebooks of a kind that have a profile; without any, all."""
    paths = all_notebooks(kind)
    if not paths:
        raise ValueError(f"no {kind} in {_places()[0]}; name those that should run")
    entries = profiles(paths[0]).get(profile, {}) if profile != "quick" else {}
    return [path for path in paths if path.stem in entries] or paths


def from_here(text: str) -> str:
    """Make paths of existing data files absolute: kernels run in another folder."""

    def absolute(match):
        path = Path(match[0])
        return path.absolute().as_posix() if path.is_file() else match[0]

    return re.sub(
        rf"""[^\s'"\[\],][^'"\[\],]*{DATA_FILE}(?=['"\[\],\s]|$)""", absolute, text
    )
