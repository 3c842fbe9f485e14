"""Explorers alone, for a classroom projector: notebooks reduced to what a listener moves and sees, served by Voila.

The reduced notebooks lie in a temporary folder. Their other cells run too, but show nothing, and save into that folder.
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
from uqlab.runs.parameters import cells, defaults

EXPLORER = re.compile(r"(?<![\w.])widgets\.\w+\(")  # not ipywidgets.
WIDGET = "application/vnd.jupyter.widget-view+json"
KERNEL = {
    "name": "python3",
    "display_name": "Python 3",
    "language": "python",
}  # Voila asks for name and language
STYLE = Path(__file__).with_name("dashboards.css")


def reduced(notebook: Path, parameters: Mapping[str, Any], results: Path) -> Any:
    """Return the notebook reduced to its title, its question and its explorers, each explorer under its own text.

    parameters: as `parameters.overrides` returns them. results: a folder in which every kernel makes one of its own.
    Raises ValueError if no cell calls a function of `widgets`.
    """
    from nbformat import v4

    given: list[dict[str, Any]] = [
        cell | {"source": "".join(cell["source"])} for cell in cells(notebook)
    ]
    shown = [
        i
        for i, cell in enumerate(given)
        if cell["cell_type"] == "code" and EXPLORER.search(cell["source"])
    ]
    if not shown:
        raise ValueError(
            f"{notebook.stem} has no explorer, a cell that calls a function of `widgets`; choose another"
        )
    values = dict(parameters) | (
        {"output_dir": ""} if "output_dir" in defaults(notebook) else {}
    )
    enter = f"import uqlab.runs.dashboards\nuqlab.runs.dashboards.enter({str(notebook.parent)!r}, {str(results)!r})"
    new = [
        v4.new_markdown_cell(
            f"<style>\n{STYLE.read_text()}</style>\n\n{_opening(given[0]['source'])}"
        ),
        v4.new_code_cell(enter),
    ]
    text = ""
    for i, cell in enumerate(given[: shown[-1] + 1]):
        if cell["cell_type"] == "markdown":
            text = _invitation(cell["source"])
        elif i in shown:
            new += [
                v4.new_markdown_cell(text),
                v4.new_code_cell(_unseen(cell["source"], widgets=True)),
            ]
            text = ""
        elif cell["cell_type"] == "code":
            new.append(v4.new_code_cell(_unseen(cell["source"])))
            if "parameters" in cell["metadata"].get("tags", []):
                new.append(
                    v4.new_code_cell(
                        "\n".join(
                            f"{name} = {value!r}" for name, value in values.items()
                        )
                    )
                )
    return v4.new_notebook(cells=new, metadata={"kernelspec": KERNEL})


def _opening(text: str) -> str:
    """Return the title of a notebook and its question, or the paragraph in its place."""
    title, *paragraphs = text.strip().split("\n\n")
    question = next(
        (each for each in paragraphs if each.startswith("**Question.**")),
        "".join(paragraphs[:1]),
    )
    return f"{title}\n\n{question.removeprefix('**Question.**').strip()}"


def _invitation(text: str) -> str:
    """Return what a text says of the explorer below it: the section "Try it" without answers, or the last paragraph."""
    text = re.sub(r"\n*<details>.*?</details>", "", text, flags=re.DOTALL)
    found = re.search(r"^#+ (Try it|Explore)\b.*", text, re.MULTILINE | re.DOTALL)
    return found[0] if found else text.strip().rpartition("\n\n")[2]


def _unseen(source: str, widgets: bool = False) -> str:
    return f"uqlab.runs.dashboards.unseen({source!r}, {widgets=})"


def enter(folder: str, results: str) -> None:
    """Let a kernel work in the notebook's folder and save into a new folder in `results`."""
    os.chdir(folder)
    os.environ[FOLDER] = tempfile.mkdtemp(dir=results)


def unseen(source: str, widgets: bool = False) -> None:
    """Run a cell and show nothing of it, or nothing but its widgets; unlike `%%capture`, raise its error."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    with capture_output() as captured:
        result = InteractiveShell.instance().run_cell(source)
    result.raise_error()
    for output in captured.outputs if widgets else []:
        if WIDGET in output.data:
            output.display()


def serve(
    plan: Mapping[Path, Mapping[str, Any]],
    *,
    port: int = 8866,
    browser: bool = True,
    theme: str = "light",
) -> None:
    """Serve the explorers of notebooks on this machine until interrupted, and leave nothing behind.

    plan: notebook -> its parameters, as for `reduced`. port: if it is taken, the next free one. A kernel for each page
    starts at once, and another whenever a reader takes one, so that pages open without a wait. As in JupyterLab, the
    address holds a token that others do not know, and a page of another site cannot ask under a name of its own.
    """
    import nbformat
    from joblib import cpu_count
    from voila.app import Voila

    class Guarded(Voila):
        def init_settings(self) -> dict:
            settings: Any = super().init_settings()
            return settings | {
                "allow_remote_access": False
            }  # the name in "Host" must be this machine's

        def launch_browser(self) -> None:
            webbrowser.open(self.display_url)  # with the token

    with tempfile.TemporaryDirectory(prefix="uqlab-") as temporary:
        pages, results = Path(temporary, "pages"), Path(temporary, "results")
        for folder in (pages, results):
            folder.mkdir()
        for path, parameters in plan.items():
            nbformat.write(reduced(path, parameters, results), pages / path.name)
        os.environ |= environment(max(1, cpu_count() // len(plan)), results)
        served = pages if len(plan) > 1 else next(pages.iterdir())
        options = [
            "--VoilaConfiguration.preheat_kernel=True",
            "--VoilaConfiguration.classic_tree=True",
        ]
        options += [
            f"--VoilaConfiguration.theme={theme}",
            f"--port={port}",
            *([] if browser else ["--no-browser"]),
        ]
        Guarded.launch_instance([str(served), "--Voila.auto_token=True", *options])
