"""The report on a user's model: a page's parameters, its numbers as text, itself."""

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uqlab.core.files import Values, fingerprint, write
from uqlab.core.recording import Record
from uqlab.runs.manifest import Manifest
from uqlab.runs.parameters import find, meant
from uqlab.runs.tables import options

PAGE = "16_bring_your_model"
SAVED = "saved_logits"  # the study that needs no model


def parameters(
    model: str,
    dataset: str | None,
    ood: Sequence[str],
    weights: Sequence[str],
    settings: dict[str, str],
) -> dict[str, str]:
    """Return what a command line brings as parameters of page 16, in text."""
    values = {
        "model": source(model),
        "dataset": dataset,
        "ood": ood and str(list(ood)),
        "weights": weights and str([_absolute(place) for place in weights]),
        "settings": settings and str({k: _setting(v) for k, v in settings.items()}),
    }
    return {name: text for name, text in values.items() if text}


def plan(
    logits: str | None, watch: str | None, folder: Path, **brought: Any
) -> tuple[str, str, dict[str, str]]:
    """Return what the report is called, the page that runs, its parameters in text.

    No kind of report, and none of other watched inputs, takes the place of another.
    Raises ValueError for two kinds at once, and for an alarm that is not there.
    """
    given = {"--watch": watch, "--logits": logits, "a model": any(brought.values())}
    if len(kinds := [kind for kind, value in given.items() if value]) > 1:
        raise ValueError(f"a report is of one of them, got {' and '.join(kinds)}")
    if watch:
        alarm = folder / "alarm.json"
        if not alarm.is_file():
            place = options("quick", folder, "report")
            raise ValueError(f"no {alarm}; first: uqlab report --logits FILE{place}")
        name = f"watch_{Path(watch).stem}"
        before = Manifest.read(folder / name / SAVED).parameters
        if before.get("watch", watch) != watch:  # another file of that name
            name += f"_{fingerprint(watch)[:8]}"
        return name, SAVED, {"watch": watch, "alarm": str(alarm.absolute())}
    if logits:
        return "logits", SAVED, {"logits": logits}
    return "report", PAGE, parameters(**brought)


def with_parameters(values: Values, more: Values) -> Values:
    """Return parameters and those of -p; ValueError where one is given twice."""
    if twice := sorted(values.keys() & more.keys()):
        raise ValueError(f"{twice[0]}: given by an option and by -p; choose")
    return values | more


def source(model: str) -> str:
    """Return the model as a kernel in another folder finds it.

    Parameters
    ----------
    model
        "file.py:function", a folder, or "module:function", which may be a file of the
        current folder.

    Raises
    ------
    ValueError
        For a file that is not there.
    """
    place, colon, function = model.rpartition(":")
    file = place if place.endswith(".py") else f"{place.replace('.', '/')}.py"
    path = Path(file).expanduser().absolute()
    if colon and path.is_file():
        return f"{path}:{function}"
    if place == file:
        raise ValueError(
            f"no file {path}; a model is FILE.py:FUNCTION, MODULE:FUNCTION or a folder"
        )
    return model and _absolute(model)


def _setting(text: str) -> Any:
    """Return what the text of a setting means, or the path of a file that exists."""
    return _absolute(text) if Path(text).expanduser().is_file() else meant(text)


def _absolute(place: str) -> str:
    """Return files, folders and patterns that exist as seen from anywhere."""
    path = str(Path(place).expanduser().absolute())
    return path if glob.glob(path) else place


def screen(folder: Path) -> str:
    """Return what a finished run of a report says, as text."""
    results = Record.read(folder)
    table = results.tables["report"]
    rows = [("", *table["columns"])]
    rows += [(n, *row) for n, row in zip(table["index"], table["data"], strict=True)]
    lines = ["{:<44}{:<28}{:<18}{}".format(*row).rstrip() for row in rows]
    if results.claims:
        lines += ["", "It claims:"]
    for claim in results.claims.values():
        lines.append(f"[{'x' if claim.holds else ' '}] {claim.sentence}")
    lines += ["", "What to do next (in brackets: the page)"]
    todo = enumerate(results.numbers["next"], 1)
    return "\n".join([*lines, *(f"{number}. {line}" for number, line in todo)])


def html(folder: Path, target: Path, name: str) -> Path:
    """Write the executed page as one HTML file that loads nothing from a network."""
    from nbconvert import HTMLExporter  # takes a second
    from traitlets.config import Config

    hidden = {"hide-input", "injected-parameters"}
    fold = {"enabled": True, "remove_input_tags": hidden}
    exporter = HTMLExporter(
        config=Config(TagRemovePreprocessor=fold),
        mathjax_url="",
        require_js_url="",
        jquery_url="",
    )
    text, _ = exporter.from_filename(str(folder / f"{folder.name}.ipynb"))
    pages = find(PAGE).parent.as_uri()
    target = target / f"{name}.html"
    write(target, re.sub(r'href="(?=\d\d_\w+\.ipynb")', f'href="{pages}/', text))
    return target
