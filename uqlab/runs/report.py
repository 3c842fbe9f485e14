"""The report on a user's model: a notebook's parameters, and its findings as text."""

import glob
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas

from uqlab.core.files import Values, fingerprint, write
from uqlab.core.recording import Record
from uqlab.runs.manifest import Manifest
from uqlab.runs.parameters import find, from_here, meant

LESSON = "16_bring_your_model"
SAVED = "saved_logits"  # the study that needs no model


def of_model(
    model: str,
    dataset: str | None,
    ood: Sequence[str],
    weights: Sequence[str],
    settings: Values,
) -> Values:
    """Return what a command line names as parameters of lesson 16.

    Raises ValueError for a file that is not there.
    """
    place, colon, function = model.rpartition(":")
    file = Path(place if place.endswith(".py") else f"{place.replace('.', '/')}.py")
    if colon and file.expanduser().is_file():  # a kernel runs in another folder
        model = f"{file.expanduser().absolute()}:{function}"
    elif place.endswith(".py"):
        raise ValueError(
            f"no file {place}; a model is FILE.py:FUNCTION, MODULE:FUNCTION or a folder"
        )
    values = {
        "model": _absolute(model),
        "dataset": dataset and from_here(dataset),
        "ood": list(map(from_here, ood)),
        "weights": [_absolute(path) for path in weights],
        "settings": {n: meant(_absolute(text)) for n, text in settings.items()},
    }
    return {name: value for name, value in values.items() if value}


def _absolute(place: str) -> str:
    """Return files, folders and patterns that exist as seen from anywhere."""
    path = str(Path(place).expanduser().absolute())
    return path if place and glob.glob(path) else place


def plan(
    logits: str | None, watch: str | None, folder: Path, **brought: Any
) -> tuple[str, str, Values]:
    """Return the notebook that runs, the report's name, and the parameters.

    Watched files of one name have reports of different names.
    """
    values = of_model(**brought)
    if bool(values) + bool(logits) + bool(watch) > 1:
        raise ValueError("give one of --logits, --watch and a model")
    if logits:
        return SAVED, "logits", {"logits": logits}
    if not watch:
        return LESSON, "report", values
    alarm = folder.absolute() / "alarm.json"
    if not alarm.is_file():
        raise ValueError(f"no {alarm}; first: uqlab report --logits FILE")
    name = f"watch_{Path(watch).stem}"
    if Manifest.read(folder / name / SAVED).parameters.get("watch", watch) != watch:
        name += f"_{fingerprint(watch)[:8]}"
    return SAVED, name, {"watch": watch, "alarm": str(alarm)}


def finish(run: Path, folder: Path, name: str) -> str:
    """Write a finished run as one HTML file; return its findings as text."""
    if (run / "alarm.json").is_file():
        shutil.copy(run / "alarm.json", folder)
    page = folder / f"{name}.html"
    _write_html(run / f"{run.name}.ipynb", page)
    record = Record.read(run)
    table = record.tables["report"]
    frame = pandas.DataFrame(table["data"], table["index"], table["columns"])
    lines = [frame.to_string(), ""]
    for claim in record.claims.values():
        lines.append(f"[{'x' if claim.holds else ' '}] {claim.sentence}")
    lines += ["", "What to do next (in brackets: the lesson)", *record.numbers["next"]]
    return "\n".join([*lines, "", f"figures and numbers: {run}", f"look at: {page}"])


def _write_html(notebook: Path, page: Path) -> None:
    """Write an executed notebook as HTML that loads nothing from a network."""
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
    text, _ = exporter.from_filename(str(notebook))
    lessons = find(LESSON).parent.as_uri()
    write(page, re.sub(r'href="(?=\d\d_\w+\.ipynb")', f'href="{lessons}/', text))
