"""What all tests share: pages that run once for all of them, and how the tests are dealt out to several processes."""

import functools
import gc
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from jaxtyping import _decorator, config

# Neither torch nor the package: what follows must come before the one, the hook that checks shapes before the other.
WORKER = os.environ.get(
    "PYTEST_XDIST_WORKER"
)  # this process's name, where pytest-xdist runs several
if WORKER:  # one thread each, kernels and other children too; those that wait sleep, instead of taking the other's core
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }

os.environ["UQLAB_CACHE"] = (
    ""  # every page trains; tests/runs/test_caching.py has a cache of its own
)
os.environ["UQLAB_TUNE"] = (
    "0"  # equal digits at each run; tests/core/test_tuning.py measures
)


def once(function: Callable) -> Callable:
    """Remember what a function returns, unless its arguments cannot be."""
    remembered = functools.cache(function)

    def call(*arguments, **named):
        try:
            return remembered(*arguments, **named)
        except TypeError:
            return function(*arguments, **named)

    return call


# The package's inner functions are defined anew at every call of the outer ones; what checks their shapes is made once.
_decorator._make_fn_with_signature = once(_decorator._make_fn_with_signature)
_decorator._apply_typechecker = once(_decorator._apply_typechecker)

gc.disable()  # until the tests are collected; then garbage collections do not look at what imports have made

# The longest first, so that no process is left with one of them at the end; each starts with the words given.
LONGEST = [
    "browser/", "notebooks/test_sst2", "notebooks/::07", "notebooks/::12", "notebooks/::09", "notebooks/::",
    "test_scoreboard", "models/test_pretrained",
    "notebooks/test_pretrained_notebook", "notebooks/test_b", "notebooks/test_committed_runs",
    "runs/test_faults", "heads/test_fused", "extraction/test_extraction",
    "ensembles/test_implicit", "data/test_real_data", "models/test_embedded", "runs/test_dashboards",
    "heads/test_circuits", "runs/test_sweeps", "runs/test_identity", "test_packaging",
    "test_methods", "test_guides", "runs/test_commands",
]  # fmt: skip


PAGES = (
    "notebooks/test_notebooks.py",
    "notebooks/test_findings.py",
    "notebooks/test_texts.py",
)


def group_of(test: str) -> str:
    """Tests of one group run in one process: those of a file, so that its fixtures are made once, or of one page."""
    path = test.partition("::")[0].removeprefix("tests/")
    if path.startswith("browser/"):
        return "browser/"
    page = re.search(r"\d\d_", test) if path.startswith(PAGES) else None
    return f"notebooks/::{page[0]}" if page else path


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before tests are collected, because they are skipped where their files are missing."""
    if folder := os.environ.get("UQLAB_DATA"):
        import repacked

        repacked.unpack(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    torch.set_num_threads(1 if WORKER else min(2, torch.get_num_threads()))
    if WORKER:
        starts = [*LONGEST, ""]
        items.sort(
            key=lambda item: next(
                i for i, s in enumerate(starts) if group_of(item.nodeid).startswith(s)
            )
        )


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # they are in order
    return Groups(config, log)


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
    from uqlab.runs import parameters

    with FileLock(shared / "pages.lock"):
        notebooks = copies(shared / "notebooks")

    def run(name: str, **changes) -> Path:
        changed = (
            hashlib.sha256(repr(sorted(changes.items())).encode()).hexdigest()[:8]
            if changes
            else "tiny"
        )
        folder = shared / "pages" / changed / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                path = parameters.find(name) if changes else notebooks / f"{name}.ipynb"
                runs.execute(path, changes, profile="tiny", folder=folder, threads=1)
        return folder

    return run


@pytest.fixture
def unchecked():
    """Switch the shape checks of the test run off, to see the errors that a user gets without them."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
