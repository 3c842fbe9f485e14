"""What the tests of pages share."""

import pytest

from uqlab.core.files import read_json


@pytest.fixture
def results(pages):
    """name -> recorded numbers and the folder of the run."""

    def read(name, **changes):
        folder = pages(name, **changes)
        return read_json(folder / "results.json"), folder

    return read
