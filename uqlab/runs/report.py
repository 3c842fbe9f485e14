"""The report on a user's model: page 16's parameters from a command line, its numbers on one screen, itself as HTML."""

import glob
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from uqlab.core.files import write
from uqlab.core.recording import Record
from uqlab.runs.parameters import find

PAGE = "16_bring_your_model"
COLUMNS = (44, 28, 18, 0)  # of the screen: what, value, interval, beside it


def page() -> Path:
    """Return page 16."""
    return find(PAGE)


def source(model: str) -> str:
    """Return the model as a kernel in another folder finds it; raises ValueError for a file that is not there.

    model: "file.py:function", a folder, or "module:function", which may be a file of the current folder.
    """
    place, colon, function = model.rpartition(":")
    near = (
        Path(f"{place.replace('.', '/')}.py")
        if not place.endswith(".py")
        else Path(place).expanduser()
    )
    if colon and near.is_file():
        return f"{near.absolute()}:{function}"
    if place.endswith(".py"):
        raise ValueError(
            f"no file {near.absolute()}; a model is FILE.py:FUNCTION, MODULE:FUNCTION or a folder"
        )
    return (
        str(Path(model).expanduser().absolute())
        if Path(model).expanduser().is_dir()
        else model
    )


def weights(places: Iterable[str]) -> list[str]:
    """Return files, folders and patterns as a kernel in another folder finds them, and other names as given."""
    full = {place: str(Path(place).expanduser().absolute()) for place in places}
    return [path if glob.glob(path) else place for place, path in full.items()]


def screen(folder: Path) -> str:
    """Return what a finished run of page 16 says, as text."""
    recorded = Record.read(folder)
    table = recorded.tables["report"]
    rows = [
        ("", *table["columns"]),
        *(
            (name, *row)
            for name, row in zip(table["index"], table["data"], strict=True)
        ),
    ]
    lines = [
        "".join(
            f"{cell:<{width}}" for cell, width in zip(row, COLUMNS, strict=True)
        ).rstrip()
        for row in rows
    ]
    claims = [
        f"[{'x' if claim.holds else ' '}] {claim.sentence}"
        for claim in recorded.claims.values()
    ]
    todo = [
        f"{number}. {line}" for number, line in enumerate(recorded.numbers["next"], 1)
    ]
    return "\n".join(
        [
            *lines,
            "",
            "It claims:",
            *claims,
            "",
            "What to do next (in brackets: the page)",
            *todo,
        ]
    )


def html(folder: Path, target: Path) -> Path:
    """Write the executed page as one HTML file, without its folded code; it loads nothing from a network."""
    from nbconvert import HTMLExporter  # takes a second
    from traitlets.config import Config

    settings: Any = Config()
    settings.TagRemovePreprocessor.remove_input_tags = {
        "hide-input",
        "injected-parameters",
    }
    exporter = HTMLExporter(
        config=settings, mathjax_url="", require_js_url="", jquery_url=""
    )
    exporter.register_preprocessor(
        "nbconvert.preprocessors.TagRemovePreprocessor", enabled=True
    )
    text, _ = exporter.from_filename(str(folder / f"{PAGE}.ipynb"))
    write(
        target,
        re.sub(r'href="(?=\d\d_\w+\.ipynb")', f'href="{page().parent.as_uri()}/', text),
    )
    return target
