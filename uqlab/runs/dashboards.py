"""Explorers alone, for a classroom projector: what a listener moves and sees, by Voila.

Notebooks are reduced to that in a temporary folder. Their other cells run too, but show
nothing, and save into that folder.
"""

import os
import re
import tempfile
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uqlab.core.recording import FOLDER
from uqlab.runs.execution import environment
from uqlab.runs.parameters import cells

EXPLORER = re.compile(r"(?<![\w.])widgets\.\w+\(")  # not ipywidgets.
WIDGET = "application/vnd.jupyter.widget-view+json"
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
STYLE = Path(__file__).with_name("dashboards.css")
ENTER = "import uqlab.runs.dashboards\nuqlab.runs.dashboards.enter({!r}, {!r})"


def reduced(notebook: Path, parameters: Mapping[str, Any], results: Path) -> Any:
    """Return the notebook reduced to its title, its question and its explorers.

    Each explorer keeps its own text.

    Parameters
    ----------
    notebook
        Its path.
    parameters
        As `parameters.overrides` returns them.
    results
        A folder in which every kernel makes one of its own.

    Raises
    ------
    ValueError
        If no cell calls a function of `widgets`.
    """
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    title, *others = cells(notebook)
    page = _up_to_the_last_explorer(others, {**parameters, "output_dir": ""})
    if not page:
        raise ValueError(
            f"{notebook.stem} has no explorer, a cell that calls a function of "
            "`widgets`; choose another"
        )
    style = f"<style>\n{STYLE.read_text()}</style>\n\n"
    opening = new_markdown_cell(style + _opening("".join(title["source"])))
    enter = new_code_cell(ENTER.format(str(notebook.parent), str(results)))
    metadata = {"kernelspec": KERNEL}
    return new_notebook(cells=[opening, enter, *page], metadata=metadata)


def _up_to_the_last_explorer(
    cells: list[dict[str, Any]], values: dict[str, Any]
) -> list[Any]:
    """Return explorers, each under its text, and the cells before them, unseen."""
    from nbformat.v4 import new_code_cell, new_markdown_cell

    page, invitation, end = [], "", 0
    for cell in cells:
        source = "".join(cell["source"])
        if "parameters" in cell["metadata"].get("tags", []):
            source += "".join(f"\n{name} = {value!r}" for name, value in values.items())
        if cell["cell_type"] == "markdown":
            invitation = _invitation(source)
        elif EXPLORER.search(source):
            page.append(new_markdown_cell(invitation))
            page.append(new_code_cell(_unseen(source, widgets=True)))
            invitation, end = "", len(page)
        else:
            page.append(new_code_cell(_unseen(source)))
    return page[:end]


def _opening(text: str) -> str:
    """Return the title of a notebook and its question, or its first paragraph."""
    title, *paragraphs = text.strip().split("\n\n")
    questions = [p for p in paragraphs if p.startswith("**Question.**")]
    question = "".join((questions or paragraphs)[:1])
    return f"{title}\n\n{question.removeprefix('**Question.**').strip()}"


def _invitation(text: str) -> str:
    """Return what a text says of the explorer below: "Try it", or its end."""
    text = re.sub(r"\n*<details>.*?</details>", "", text, flags=re.DOTALL)  # answers
    section = re.search(r"^#+ (Try it|Explore)\b.*", text, re.MULTILINE | re.DOTALL)
    return section[0] if section else text.strip().rpartition("\n\n")[2]


def _unseen(source: str, widgets: bool = False) -> str:
    return f"uqlab.runs.dashboards.unseen({source!r}, {widgets=})"


def enter(folder: str, results: str) -> None:
    """Let a kernel work in the notebook's folder and save into one of its own."""
    os.chdir(folder)
    os.environ[FOLDER] = tempfile.mkdtemp(dir=results)


def unseen(source: str, widgets: bool = False) -> None:
    """Run a cell and show nothing of it but its errors and, if wanted, its widgets."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    with capture_output() as captured:
        result = InteractiveShell.instance().run_cell(source)
    result.raise_error()
    for output in captured.outputs:
        if widgets and WIDGET in output.data:
            output.display()


def serve(
    plan: Mapping[Path, Mapping[str, Any]],
    *,
    port: int = 8866,
    browser: bool = True,
    theme: str = "light",
) -> None:
    """Serve the explorers of notebooks on this machine until interrupted.

    Nothing is left behind. As in JupyterLab, the address holds a token that others do
    not know, and a page of another site cannot ask under a name of its own.

    Parameters
    ----------
    plan
        Notebook -> its parameters, as for `reduced`. A kernel for each starts at once,
        and another whenever a reader takes one, so that pages open without a wait.
    port
        If it is taken, the next free one.
    browser
        Whether to open the address.
    theme
        "light" or "dark".
    """
    import nbformat
    from joblib import cpu_count
    from voila.app import Voila

    class Guarded(Voila):
        def init_settings(self) -> dict:
            """Take only requests whose "Host" is this machine's name."""
            settings: Any = super().init_settings()
            return settings | {"allow_remote_access": False}

        def launch_browser(self) -> None:
            """Open the address with its token."""
            webbrowser.open(self.display_url)

    with tempfile.TemporaryDirectory(prefix="uqlab-") as folder:
        os.environ |= environment(max(1, cpu_count() // len(plan)), Path(folder))
        pages = Path(folder, "pages")
        pages.mkdir()
        for path, parameters in plan.items():
            page = reduced(path, parameters, Path(folder))
            nbformat.write(page, pages / path.name)
        served = pages if len(plan) > 1 else next(pages.iterdir())
        Guarded.launch_instance(
            [
                str(served),
                "--Voila.auto_token=True",
                "--VoilaConfiguration.preheat_kernel=True",
                "--VoilaConfiguration.classic_tree=True",
                f"--VoilaConfiguration.theme={theme}",
                f"--port={port}",
                *([] if browser else ["--no-browser"]),
            ]
        )
