"""Pages under papermill alone, without the runner: what they are given is checked, and exported they have explorers."""

import logging

import pytest
from nbconvert import HTMLExporter
from papermill import PapermillExecutionError, execute_notebook, inspect_notebook
from small_runs import notebook

from uqlab import runs
from uqlab.runs import parameters

CHECKED = "from uqlab import runs\nruns.check(globals())"
EXPLORER = """from uqlab import widgets
widgets.guess("how many?", 1, 9, answer=7, then="It was seven.")"""
ALL = [page for kind in parameters.KINDS for page in parameters.all_notebooks(kind)]


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.stem)
def test_papermill_reads_all_parameters_of_a_page(page, caplog):
    with caplog.at_level(logging.WARNING):
        found = inspect_notebook(str(page))
    assert caplog.text == ""
    assert found.keys() == parameters.defaults(page).keys()


INJECTED = "# Parameters\n"
BEFORE = ["", "import torch\nx = 1", "widths = [0.5, 8.0]  # factors\nmembers = 4", "x"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("memebrs = 3", "unknown parameter 'memebrs'; did you mean 'members'"),
        ("seed = 3", "unknown parameter 'seed'; this page has: widths, members"),
        ('widths = "[0.5, 8]"', r"-y: widths must be a valid list, got '\[0.5, 8\]'"),
        ("members = 2.5", "members must be a valid integer, got 2.5"),
    ],
)
def test_what_papermill_writes_below_the_parameters_is_checked(given, words):
    with pytest.raises(ValueError, match=words):
        runs.check({"In": [*BEFORE, INJECTED + given]})


def test_what_fits_and_what_the_reader_types_is_left_alone():
    runs.check(
        {"In": [*BEFORE, INJECTED + "members = 3\nwidths = [1, 2]", "other = 1"]}
    )


def test_an_executed_page_refuses_a_misspelt_name_and_exports_its_explorers(tmp_path):
    page = notebook(tmp_path / "page.ipynb", CHECKED, EXPLORER)
    out = str(tmp_path / "out.ipynb")
    how = {"kernel_name": "python3", "language": "python", "progress_bar": False}
    with pytest.raises(PapermillExecutionError, match="did you mean 'seed'"):
        execute_notebook(str(page), out, {"sede": 1}, **how)
    execute_notebook(str(page), out, {"seed": 1}, **how)
    html = HTMLExporter().from_filename(out)[0]
    assert "<iframe" in html
    assert "It was seven." in html
    assert "widget-view" not in html
