"""Reduced notebooks show their explorers and nothing else, run without Voila, and Voila serves them."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from uqlab import runs
from uqlab.runs import cli, dashboards, parameters

WIDGETS = """import ipywidgets
import matplotlib.pyplot as plt
from uqlab import runs


class widgets:  # in place of uqlab's, which take seconds to import
    def explore(x):
        return ipywidgets.VBox([ipywidgets.IntSlider(x)])
"""

CELLS = [
    ("markdown", "# A page\n\n**Question.** Does it move?\n\n**Takes** a second."),
    ("code", WIDGETS),
    ("parameters", 'start = 1  # of the slider\noutput_dir = ""  # folder'),
    ("code", "assert start > 0\nfolder = runs.begin(output_dir, 'a_page')"),
    (
        "code",
        "import sys\nplt.plot([0, start])\nplt.savefig(folder / 'still.png')\nprint('seen?', file=sys.stderr)",
    ),
    (
        "code",
        "%matplotlib inline\nrunning = runs.record('here', __import__('os').getcwd())\ndisplay(running)\nrunning",
    ),
    ("markdown", "A long story.\n\n## Try it\n\nMove it.\n\nGuess first."),
    ("code", "steps = [0, start]\nsteps"),
    ("code", "print('seen?')\nplt.plot(steps)\nplt.show()\nwidgets.explore(start)"),
    ("markdown", "## After"),
    ("code", "raise RuntimeError('dropped')"),
]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def page(tmp_path):
    """Write a notebook of the cells given, by default CELLS, and return its path."""

    def write(cells=CELLS):
        make = {
            "markdown": nbformat.v4.new_markdown_cell,
            "code": nbformat.v4.new_code_cell,
        }
        made = [make.get(kind, make["code"])(source) for kind, source in cells]
        for cell, (kind, _) in zip(made, cells, strict=True):
            cell.metadata.tags = [kind] if kind == "parameters" else []
        path = tmp_path / "notebooks" / "a_page.ipynb"
        path.parent.mkdir(exist_ok=True)
        nbformat.write(nbformat.v4.new_notebook(cells=made), path)
        return path

    return write


def executed(notebook, given, results):
    results.mkdir()
    reduced = dashboards.reduced(notebook, given, results)
    nbformat.validate(reduced)
    NotebookClient(reduced, timeout=400).execute()
    return reduced


def outputs(reduced):
    return [
        output
        for cell in reduced.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]


def test_only_title_question_invitation_and_explorer_remain(page, tmp_path):
    reduced = executed(page(), {}, tmp_path / "results")
    said = [cell.source for cell in reduced.cells if cell.cell_type == "markdown"]
    assert said == [
        f"<style>\n{dashboards.STYLE.read_text()}</style>\n\n# A page\n\nDoes it move?",
        "## Try it\n\nMove it.\n\nGuess first.",
    ]
    (shown,) = outputs(reduced)
    model = shown["data"][dashboards.WIDGET]["model_id"]
    state = reduced.metadata.widgets["application/vnd.jupyter.widget-state+json"][
        "state"
    ]
    assert state[model]["model_name"] == "VBoxModel"
    assert [
        part["state"]["value"]
        for part in state.values()
        if part["model_name"] == "IntSliderModel"
    ] == [1]


def test_parameters_arrive_and_results_stay_in_the_folder(page, tmp_path):
    path = page()
    before = sorted(tmp_path.rglob("*"))
    reduced = executed(path, {"start": 7}, tmp_path / "results")
    state = reduced.metadata.widgets["application/vnd.jupyter.widget-state+json"][
        "state"
    ]
    assert [
        part["state"]["value"]
        for part in state.values()
        if part["model_name"] == "IntSliderModel"
    ] == [7]
    (folder,) = (tmp_path / "results").iterdir()
    assert sorted(file.name for file in folder.iterdir()) == [
        "results.json",
        "still.png",
    ]
    recorded = json.loads((folder / "results.json").read_text())["numbers"]
    assert recorded["here"] == str(path.parent)  # as `uqlab run` and Jupyter have it
    shutil.rmtree(tmp_path / "results")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_error_of_an_unseen_cell_is_not_swallowed(page, tmp_path):
    with pytest.raises(CellExecutionError, match="AssertionError"):
        executed(page([*CELLS[:1], *CELLS[2:]]), {"start": 0}, tmp_path / "results")


def test_explorers_each_keep_their_own_text(page, tmp_path):
    again = [
        ("markdown", "Some prose.\n\nAnd now the other."),
        ("code", "n = 2"),
        CELLS[-3],
    ]
    reduced = dashboards.reduced(page([*CELLS[:-2], *again]), {}, tmp_path)
    said = [cell.source for cell in reduced.cells if cell.cell_type == "markdown"]
    assert said[1:] == ["## Try it\n\nMove it.\n\nGuess first.", "And now the other."]
    assert sum("widgets=True" in cell.source for cell in reduced.cells) == 2


@pytest.mark.parametrize(
    "path", parameters.all_notebooks(), ids=lambda path: path.stem[:2]
)
def test_every_page_has_an_explorer_and_words_for_it(path, tmp_path):
    cells = dashboards.reduced(path, {}, tmp_path).cells
    said = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert cells[-1].source.endswith("widgets=True)")
    assert re.search(r"</style>\n\n# \d\d", said[0])
    assert len(said) > 1
    assert all(40 < len(text) < 800 for text in said[1:])
    assert not any("<details>" in text for text in said), (
        "no answer before the question was played with"
    )


def test_page_00_shows_its_explorer(tmp_path):
    path = parameters.find("00")
    small = parameters.overrides(path, "tiny", {"repeats": 50, "limit": 100})
    reduced = executed(path, small, tmp_path / "results")
    (shown,) = outputs(reduced)
    assert dashboards.WIDGET in shown["data"]
    assert list((tmp_path / "results").glob("*/simplex.png"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["00", "-p", "member", "3"],
            "unknown parameter 'member'; did you mean 'members'?",
        ),
        (["00", "-p", "members", "many"], "must be a valid integer"),
        (["00", "-p", "output_dir", "x"], "output_dir is set by the runner"),
        (["00", "--profile", "tinny"], "unknown profile 'tinny'"),
        (["99"], "'99' is no notebook of"),
    ],
)
def test_what_run_refuses_is_refused(arguments, message):
    for command in ("run", "dashboards"):
        result = CliRunner().invoke(cli.main, [command, *arguments])
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", " ").split())


def test_a_page_without_explorer_is_refused(page):
    result = CliRunner().invoke(cli.main, ["dashboards", str(page(CELLS[:-3]))])
    assert result.exit_code == 2
    assert "a_page has no explorer" in result.output


def test_without_voila_one_line_says_what_to_install(page, monkeypatch):
    for name in (
        "voila",
        "voila.app",
    ):  # the second alone decides if it was imported before
        monkeypatch.setitem(sys.modules, name, None)
    result = CliRunner().invoke(cli.main, ["dashboards", str(page())])
    assert result.exit_code == 1
    assert (
        result.output
        == "Error: Voila is missing: pip install -c constraints.txt -e '.[dashboards]'\n"
    )


def test_voila_serves_the_page_and_leaves_nothing(page, tmp_path):
    pytest.importorskip("voila", reason="the extra [dashboards] is not installed")
    port = free_port()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "uqlab.runs",
        "dashboards",
        str(page()),
        "--no-browser",
        "--port",
        str(port),
    ]
    with (tmp_path / "log").open("w") as log:
        environment = os.environ | {"TMPDIR": str(scratch)}
        server = subprocess.Popen(
            [*command, "--theme", "dark"], env=environment, stdout=log, stderr=log
        )
        try:
            address = f"http://127.0.0.1:{port}/"
            assert "Does it move?" not in fetched(
                address, server
            )  # but the page that asks for the token
            (token,) = set(re.findall(r"token=(\w+)", (tmp_path / "log").read_text()))
            rebound = urllib.request.Request(
                f"{address}?token={token}", headers={"Host": f"evil.example:{port}"}
            )
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(rebound, timeout=60)
            html = fetched(f"{address}?token={token}", server)
            said = (
                tmp_path / "log"
            ).read_text()  # later kernels are stopped as they start, and complain
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    assert "ERROR" not in said
    assert "Does it move?" in html
    assert html.count(dashboards.WIDGET) == 1
    assert "JupyterLab Dark" in html
    assert not re.search(r"There was an error|seen\?|savefig|image/png", html)
    assert list(scratch.glob("uqlab-*")) == []


def fetched(url: str, server: subprocess.Popen, seconds: float = 240) -> str:
    end = time.monotonic() + seconds
    while server.poll() is None and time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(url, timeout=seconds) as reply:
            return reply.read().decode()
        time.sleep(0.2)
    raise AssertionError(f"no page from {url}")


def test_lab_opens_the_index_of_the_checkout(monkeypatch):
    from jupyterlab.labapp import LabApp

    seen = []

    def launch(argv):
        (folder,) = (
            Path(each.partition("=")[2]) for each in argv if "app_settings_dir" in each
        )
        seen.append((argv, json.loads((folder / "overrides.json").read_text())))

    monkeypatch.setattr(LabApp, "launch_instance", launch)
    result = CliRunner().invoke(cli.main, ["lab", "--no-browser", "--port", "9000"])
    assert result.exit_code == 0, result.output
    (((root, settings, index, *others), overrides),) = seen
    assert root == f"--ServerApp.root_dir={Path(runs.__file__).parents[2]}"
    assert index.endswith("=/lab/tree/notebooks/README.md")
    assert others == ["--no-browser", "--port", "9000"]
    assert overrides == {
        "@jupyterlab/docmanager-extension:plugin": {
            "defaultViewers": {"markdown": "Markdown Preview"}
        }
    }
    assert not Path(settings.partition("=")[2]).exists()
