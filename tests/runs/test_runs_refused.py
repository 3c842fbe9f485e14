"""What the `uqlab` command refuses in a sentence, before anything runs or is written."""

import pytest
from click.testing import CliRunner

from uqlab.runs import cli


def refused(*arguments) -> str:
    result = CliRunner().invoke(cli.main, list(map(str, arguments)))
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("command", [["run", "00"], ["sweep", "00", "-g", "seed", "0:2"], ["collect"], ["gallery"]])
def test_folders_that_cannot_hold_results(command, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        said = refused(*command, "--profile", "tiny", "--output-dir", folder)
        assert f"{file} is no folder that you may write to" in said
    assert "name too long" in refused(*command, "--profile", "tiny", "--output-dir", tmp_path / ("a" * 300))
    assert list(tmp_path.iterdir()) == [file]


def test_a_gallery_stays_in_its_folder(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    assert "no runs in" in refused("gallery", "--output-dir", inner, "--profile", "..")
    assert list(tmp_path.iterdir()) == [inner]


@pytest.mark.parametrize("grid", [["seed", "0:99999999999999999999"], ["seed", "0:5000", "-g", "members", "1:5000"]])
def test_a_grid_is_counted_before_it_is_built(grid, tmp_path):
    said = refused("sweep", "00", "-g", *grid, "--profile", "tiny", "--output-dir", tmp_path)
    assert "more than the 100,000 runs that a sweep may have" in said
