"""What the tests of pages share."""

import json

import pytest


@pytest.fixture
def results(pages):
    """name -> recorded numbers and the folder of the run."""

    def read(name, **changes):
        folder = pages(name, **changes)
        return json.loads((folder / "results.json").read_text()), folder

    return read
