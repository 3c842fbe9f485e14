"""A checkout with two small notebooks, of which one fails, and the command line called in this process."""

import signal
from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from uqlab.runs import cli

PARAMETERS = """seed = 0  # random seed
lr = 0.1  # learning rate
widths = (1, 2)  # multiples
name = "digits"  # data set
output_dir = ""  # folder for figures and numbers"""

GOOD = """from uqlab import runs
import os, sys
folder = runs.begin(output_dir, "00_good")
runs.record("executable", sys.executable)
runs.record("environment", dict(os.environ))
runs.record("parameters", [seed, lr, widths, name])
runs.record("cwd", os.getcwd())
runs.claim("made", "The folder is there.", folder.is_dir())
runs.claim("late", "The day is long.", False)
folder"""

FIGURE = """import matplotlib.pyplot as plt
figure, axes = plt.subplots(figsize=(3.3, 2))
figure.savefig(folder / "mi_ecdf.png", dpi=200)
figure.savefig(folder / "mi_ecdf.pdf")
runs.describe_figure("mi_ecdf", caption="MI < 1 & <script>alert(1)</script>", paper="Figure 2a")"""

BAD = """def deep():
    raise ValueError("it does not fit:\\n" + 150 * "-" + " the reason <b>")
deep()"""


def notebook(path: Path, *sources: str, parameters: str = PARAMETERS) -> Path:
    cells = [
        new_markdown_cell("# A title & <i>\n\n**Question.** Why & how?\n\nText."),
        new_code_cell(parameters, metadata={"tags": ["parameters"]}),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(
        new_notebook(cells=cells + [new_code_cell(source) for source in sources]), path
    )
    return path


def call(*arguments: str | int | Path):
    return CliRunner().invoke(cli.main, list(map(str, arguments)))


def heed_interrupts():
    """In a new process: a shell that starts the tests in the background lets them ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(name="project")
def two_notebooks(tmp_path, monkeypatch) -> Path:
    """A checkout with two notebooks and a profile, as the current folder."""
    notebook(tmp_path / "notebooks" / "00_good.ipynb", GOOD, FIGURE)
    notebook(
        tmp_path / "notebooks" / "01_bad.ipynb",
        "before = 1",
        BAD,
        "after = 1",
        parameters="seed = 0\nname = ''\noutput_dir = ''",
    )
    (tmp_path / "notebooks" / "profiles.yaml").write_text(
        "tiny: {00_good: {seed: 5, lr: 1}, 01_bad: {}}\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path
