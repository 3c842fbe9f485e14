"""One JupyterLab server and one Chromium for all browser tests; skipped where there is no browser, but not under CI."""

import os
from pathlib import Path

import lab
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook


@pytest.fixture(scope="session")
def chromium():
    path = lab.chromium()
    if not path:
        reason = "no Chromium: `apt-get install chromium`, or `playwright install chromium`"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}; under CI a missing browser is an error")
        pytest.skip(reason)
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="session")
def address(chromium, folder):
    with lab.server(folder, root=folder) as address:
        yield address


@pytest.fixture(scope="session")
def browser(chromium):
    with lab.browser(chromium) as browser:
        yield browser


@pytest.fixture(scope="session")
def opened(browser, address):
    """Open a notebook by its path from the server's folder and run all of it."""

    def run(path: str) -> lab.Lab:
        page = lab.Lab(browser.new_page(viewport={"width": 1280, "height": 900}), address)
        page.open(path)
        page.start()
        assert page.finish() == []
        return page

    return run


@pytest.fixture(scope="session")
def made_up_page(opened, folder):
    """A page with an explorer of every kind, each in a cell of its own under its own name."""
    import made_up  # not before the hook that checks shapes

    cells = [f"import sys\nsys.path.insert(0, {str(Path(made_up.__file__).parent)!r})\nimport made_up"]
    names = [make.__name__ for make in (*made_up.EXPLORERS, *made_up.HANDS)]
    cells += [f"{name} = made_up.{name}()\n{name}" for name in names]
    path = folder / "notebooks" / "explorers.ipynb"
    path.parent.mkdir(exist_ok=True)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}  # without it JupyterLab asks which
    made = new_notebook(cells=[new_code_cell(source) for source in cells], metadata={"kernelspec": kernel})
    nbformat.write(made, path)
    return opened("notebooks/explorers.ipynb")


@pytest.fixture(scope="session")
def screenshots() -> Path | None:
    """Where pictures of the pages go, for looking at: $UQLAB_SCREENSHOTS; None, and no picture, where it is not set."""
    if kept := os.environ.get("UQLAB_SCREENSHOTS"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        return Path(kept)
    return None
