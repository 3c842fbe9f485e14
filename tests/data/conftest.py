"""What the tests of downloads and of readers share."""

import sys
from pathlib import Path

import pytest
from small_files import digest

sys.path.append(str(Path(__file__).parents[2] / "tools"))  # makers of embedded sets


@pytest.fixture
def register(monkeypatch):
    """Let the registry expect these contents, from these mirrors."""
    from uqlab.data.readers import FILES  # after the hook that checks shapes

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def register(files, *mirrors):
        for file, content in files.items():
            urls = [f"{mirror}/{file}" for mirror in mirrors or ["http://127.0.0.1:9"]]
            like = next(iter(FILES.values()))
            remote = like._replace(checksum=digest(content), urls=urls)
            monkeypatch.setitem(FILES, file, remote)

    return register
