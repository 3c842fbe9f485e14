"""One JupyterLab server and one Chromium for all browser tests; skipped where there is no browser, but not under CI."""

import os
from pathlib import Path

import lab
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

OURS = "\nObject.assign(window, {functions});"  # makes functions of a module reachable from the test


@pytest.fixture(scope="session")
def chromium():
    path = lab.chromium()
    if not path:
        reason = (
            "no Chromium: `apt-get install chromium`, or `playwright install chromium`"
        )
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
        page = lab.Lab(
            browser.new_page(viewport={"width": 1280, "height": 900}), address
        )
        page.open(path)
        page.start()
        assert page.finish() == []
        return page

    return run


@pytest.fixture(scope="session")
def small_page(folder):
    """Write a page with made-up explorers, each in a cell of its own under its own name; returns its path."""
    import made_up  # not before the hook that checks shapes

    def write(name: str, makers) -> str:
        cells = [
            f"import sys\nsys.path.insert(0, {str(Path(made_up.__file__).parent)!r})\nimport made_up"
        ]
        cells += [
            f"{make.__name__} = made_up.{make.__name__}()\n{make.__name__}"
            for make in makers
        ]
        path = folder / "notebooks" / f"{name}.ipynb"
        path.parent.mkdir(exist_ok=True)
        kernel = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }  # or JupyterLab asks which
        made = new_notebook(
            cells=[new_code_cell(source) for source in cells],
            metadata={"kernelspec": kernel},
        )
        nbformat.write(made, path)
        return f"notebooks/{name}.ipynb"

    return write


@pytest.fixture(scope="session")
def made_up_page(opened, small_page):
    """A page with an explorer of every kind."""
    import made_up

    return opened(small_page("explorers", made_up.HANDS))


@pytest.fixture
def alone(browser):
    """Open an explorer's own page; whatever it asks from outside is refused and fails the test."""
    pages, wanted, errors = [], [], []

    def open_(hand, functions: str = "{}", **how):
        page = browser.new_page(viewport={"width": 900, "height": 800}, **how)
        page.route(
            "**/*", lambda route: (wanted.append(route.request.url), route.abort())
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.set_content(
            hand.html().replace(
                "\nrender({", OURS.format(functions=functions) + "\nrender({"
            )
        )
        page.locator(".uqlab-hand .seen").first.wait_for(state="attached")
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.close()
    assert wanted == []
    assert errors == []


@pytest.fixture(scope="session")
def screenshots() -> Path | None:
    """Where pictures of the pages go, for looking at: $UQLAB_SCREENSHOTS; None, and no picture, where it is not set."""
    if kept := os.environ.get("UQLAB_SCREENSHOTS"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        return Path(kept)
    return None
