"""What the `uqlab` command refuses in a sentence, before anything runs or is written."""

import json

import pytest
from click.testing import CliRunner
from small_sweeps import checkout, stand_in  # noqa: F401  (fixtures)

from uqlab.core.files import read_json
from uqlab.runs import cli, execution, gallery, parameters


def refused(*arguments) -> str:
    result = CliRunner().invoke(cli.main, list(map(str, arguments)))
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    "command",
    [["run", "00"], ["sweep", "00", "-g", "seed", "0:2"], ["collect"], ["gallery"]],
)
def test_a_file_is_no_folder_for_results(command, tmp_path):
    file = tmp_path / "file"
    file.touch()
    said = refused(*command, "--profile", "tiny", "--output-dir", file)
    assert f"Directory '{file}' is a file" in said
    assert list(tmp_path.iterdir()) == [file]


def test_a_gallery_stays_in_its_folder(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    said = refused("gallery", "--output-dir", inner, "--profile", "..")
    assert "unknown profile '..'" in said
    assert list(tmp_path.iterdir()) == [inner]


@pytest.mark.parametrize(
    "grid",
    [["seed", "0:99999999999999999999"], ["seed", "0:5000", "-g", "members", "1:5000"]],
)
def test_a_grid_is_counted_before_it_is_built(grid, tmp_path):
    said = refused(
        "sweep", "00", "-g", *grid, "--profile", "tiny", "--output-dir", tmp_path
    )
    assert "a sweep has 1 to 100,000 runs" in said


@pytest.mark.parametrize(
    "text",
    ["tiny: &a {00_some: *a}", "tiny: &a {00_some: {sizes: [*a]}}", "&a {tiny: *a}"],
)
def test_profiles_that_hold_themselves(project, text):
    (project / "notebooks" / "profiles.yaml").write_text(text)
    with pytest.raises(ValueError, match="must map profile -> notebook"):
        parameters.profiles(project / "notebooks" / "00_some.ipynb")


@pytest.mark.parametrize("lacking", ["metadata", "source", "cell_type"])
def test_a_cell_that_lacks_something(project, lacking):
    path = project / "notebooks" / "00_some.ipynb"
    page = json.loads(path.read_text())
    del page["cells"][0][lacking]
    path.write_text(json.dumps(page))
    with pytest.raises(
        ValueError,
        match=r"not a notebook of format 4, whose cells have cell_type, metadata, source",
    ):
        parameters.overrides(path)


@pytest.mark.parametrize(
    "results",
    [
        '{"numbers": {"a": "\\ud800"}}',
        '{"figures": 3}',
        '{"tables": 3}',
        '{"claims": ["a"]}',
        "[" * 10**5,
        '{"numbers": 3}',
    ],
)
def test_the_gallery_shows_the_others(project, computed, results):
    """A result that is no result of ours does not hide those that are."""
    for name in ("00_some", "01_other"):
        execution.execute(
            parameters.find("00"),
            {},
            profile="tiny",
            folder=project / "figures" / "quick" / name,
        )
    (project / "figures" / "quick" / "01_other" / "results.json").write_text(results)
    text = gallery.build(project / "figures" / "quick").read_text(encoding="utf-8")
    assert "It is &lt;even&gt;." in text
    assert "01_other" in text


def test_half_a_character_is_no_text(tmp_path):
    (tmp_path / "a.json").write_text('{"a": "\\ud83d\\ude00"}')
    assert read_json(tmp_path / "a.json") == {"a": "\N{GRINNING FACE}"}
    (tmp_path / "a.json").write_text('{"a": "\\ud83d"}')
    assert read_json(tmp_path / "a.json") == {}
