"""What the tests of downloads and of readers share."""

import sys
from pathlib import Path

import pytest
from small_files import digest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.append(str(TOOLS))  # what made the embedded sets


@pytest.fixture
def register(monkeypatch):
    """Let the registry expect these contents, from these mirrors."""
    from uqlab.data.downloads import (
        FILES,
        Remote,
    )  # not before the hook that checks shapes

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def register(files, *mirrors):
        for file, content in files.items():
            urls = tuple(f"{mirror}/{file}" for mirror in mirrors)
            monkeypatch.setitem(
                FILES, file, Remote(digest(content), urls, FILES[file].also)
            )

    return register
