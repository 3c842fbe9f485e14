"""Copies of the notebooks, each with one more cell that moves its explorer without a browser."""

import shutil
from pathlib import Path

import nbformat

from uqlab.runs import parameters

MOVE = """
import gc, json, pathlib
from uqlab.widgets import Explorer

def other_values(control):
    if (options := getattr(control, "_options_values", None)) is not None:
        return [value for value in options if value != control.value]
    return [value for value in (control.min, control.max) if value != control.value]

def size(explorer):  # of a PNG: width and height
    return explorer.picture.value[16:24]

(explorer,) = [each for each in gc.get_objects() if type(each) is Explorer]
first, said, extent, moved = explorer.picture.value, explorer.seen.value, size(explorer), {}
for name, control in explorer.controls.items():
    for value in other_values(control):
        control.value = value  # an error of the drawing is raised here
        assert "could not be drawn" not in explorer.seen.value
        assert size(explorer) == extent
        moved[name] = moved.get(name, False) or explorer.picture.value != first
    explorer.reset()
    assert (explorer.picture.value, explorer.seen.value) == (first, said)
(pathlib.Path(output_dir) / "moved.json").write_text(json.dumps(moved))
"""


def copies(folder: Path) -> Path:
    """Copy the notebooks with that cell, and their profiles, into a folder; returns the folder."""
    if not folder.exists():
        folder.mkdir()
        for path in parameters.all_notebooks():
            page = nbformat.read(path, 4)
            page.cells.append(nbformat.v4.new_code_cell(MOVE, id="moves"))
            nbformat.write(page, folder / path.name)
        shutil.copy(path.parent / "profiles.yaml", folder)
    return folder
