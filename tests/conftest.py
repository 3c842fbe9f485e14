"""What all tests share: pages that run once for all of them, and how tests are dealt out."""

import gc
import inspect
import os
import re
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from jaxtyping import config

# Neither torch nor the package may be imported before the hook that checks shapes.
WORKER = os.environ.get("PYTEST_XDIST_WORKER")  # this process, if there are several
if WORKER:  # one thread each, kernels and other children too; those that wait sleep
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ |= {"MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
os.environ["UQLAB_CACHE"] = ""  # every page trains

# `make soak` takes the second.
how = {"deadline": None, "database": None, "suppress_health_check": [*HealthCheck]}
settings.register_profile("few", max_examples=3, derandomize=True, **how)
settings.register_profile("soak", max_examples=100, **how)
settings.load_profile("few")

gc.disable()  # until the tests are collected

# The longest first, so that no process is left with one of them at the end.
LONGEST = [
    "browser/", "notebooks/test_brought", "notebooks/::07", "notebooks/::12", "notebooks/::09", "notebooks/::",
    "test_scoreboard", "models/test_pretrained", "notebooks/test_b", "properties/test_net",
    "runs/test_faults", "ensembles/test_export", "heads/test_fused", "extraction/test_extraction", "ensembles/test_implicit",
    "data/test_real_data", "models/test_embedded", "heads/test_circuits",
    "runs/test_sweeps", "test_packaging", "test_methods", "test_guides", "runs/test_commands", "",
]  # fmt: skip
PAGES = ("notebooks/test_lessons.py",)
SLOW = (
    *("runs/test_faults", "runs/test_killed", "test_packaging"),
    *("properties/test_net", "ensembles/test_export"),
)


def group_of(test: str) -> str:
    """Tests of one group run in one process: those of a file or of one page."""
    path = test.partition("::")[0].removeprefix("tests/")
    page = re.search(r"\d\d_", test) if path.startswith(PAGES) else None
    folder = "browser/" if path.startswith("browser/") else path
    return f"notebooks/::{page[0]}" if page else folder


def runs_a_page(item: pytest.Item) -> bool:
    """Whether a test runs a page, or asks what one recorded."""
    return bool({"pages", "results"} & {*getattr(item, "fixturenames", ())})


def source(item: pytest.Item) -> str:
    return inspect.getsource(getattr(item, "function", item.__class__))


def pytest_sessionstart() -> None:
    """Before tests are collected, because they are skipped where their files are missing."""
    if folder := os.environ.get("UQLAB_DATA"):
        import repacked

        repacked.unpack(folder)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and sort them where several processes share them."""
    import torch

    torch.set_num_threads(min(2, torch.get_num_threads()))
    place = {}
    for item in items:
        group = group_of(item.nodeid)
        place[item] = next(i for i, s in enumerate(LONGEST) if group.startswith(s))
        item.add_marker(pytest.mark.xdist_group(group))
        if group.startswith("browser/"):
            item.add_marker("browser")
        if group.startswith("notebooks/") or runs_a_page(item):
            item.add_marker("page")
        if runs_a_page(item) and "_study" in item.nodeid + source(item):
            item.add_marker("release")
        if group.startswith(SLOW):
            item.add_marker("slow")
        if re.search(r"\bnear\w*\(", source(item)):
            item.add_marker("floats")
    if WORKER:
        items.sort(key=place.__getitem__)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test draws the same numbers, alone and among others."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder that all processes of this test run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if WORKER else own


@pytest.fixture(scope="session")
def pages(shared):
    """Run a page at `tiny` with the changes given and return its folder: once for all tests, whichever asks first.

    Without changes a page is a copy that also moves every control of its explorer and runs its exercises' solutions;
    moved.json and solved.json say what happened.
    """
    from small_pages import copies

    from uqlab import runs
    from uqlab.core.files import fingerprint
    from uqlab.runs import parameters

    with FileLock(shared / "pages.lock"):
        notebooks = copies(shared / "notebooks")

    def run(name: str, **changes) -> Path:
        changed = fingerprint(changes)[:8] if changes else "tiny"
        folder = shared / "pages" / changed / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                path = parameters.find(name)
                if not changes:
                    path = notebooks / path.relative_to(parameters.PAGES)
                runs.execute(path, changes, profile="tiny", folder=folder, threads=1)
        return folder

    return run


@pytest.fixture
def unchecked():
    """Switch the shape checks of the test run off, to see the errors that a user gets without them."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
