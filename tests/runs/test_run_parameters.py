"""Parameters and profiles: values given as text, what is refused before anything runs, files of one's own."""

import gc
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_runs import PARAMETERS, call, notebook, two_notebooks  # noqa: F401  (a fixture)

import uqlab
from uqlab.runs import parameters


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("seed", "-3", -3),
        ("lr", "1e-3", 1e-3),
        ("lr", "1", 1.0),
        ("widths", "[4, 8]", [4, 8]),
        ("widths", "[a, 1]", ["a", 1]),
        ("name", "1:30", "1:30"),
        ("name", "5", "5"),
        ("name", "__import__('os').getcwd()", "__import__('os').getcwd()"),
        ("flag", "true", True),
        ("nothing", "1:30", "1:30"),
        ("nothing", "null", None),
        ("nothing", "{a: 1}", {"a": 1}),
    ],
)
def test_values_are_data_of_the_default_s_type(tmp_path, name, text, value):
    path = notebook(
        tmp_path / "0.ipynb",
        parameters=PARAMETERS + "\nflag: bool = False\nnothing = None",
    )
    found = parameters.overrides(path, changes={name: text})
    assert found == {name: value}
    assert type(found[name]) is type(value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["-p", "sead", "1"],
            "unknown parameter 'sead'; did you mean 'seed'.*seed, lr, widths, name",
        ),
        (
            ["-p", "seed", "abc"],
            "00_good: parameter seed must be a valid integer, got 'abc'",
        ),
        (["-p", "seed", "1.5"], "must be a valid integer"),
        (["-p", "seed", "True"], "must be a valid integer"),
        (["-p", "widths", "3"], "must be a valid list"),
        (["-p", "output_dir", "x"], "use --output-dir"),
        (["--profile", "papr"], "unknown profile 'papr'.*quick, tiny"),
        (["99"], "'99' is no notebook of: 00_good, 01_bad"),
        (["0"], "'0' is the start of several: 00_good, 01_bad"),
    ],
)
def test_bad_input_is_an_error_before_anything_runs(project, arguments, message):
    result = call("run", *arguments)
    assert result.exit_code == 2
    assert re.search(message, result.output, re.DOTALL), result.output
    assert not (project / "figures").exists()


@pytest.mark.parametrize(
    "line", ["lr = 1 / 3", "a, b = 1, 2", "%matplotlib inline", "import os"]
)
def test_a_parameters_cell_that_computes_is_refused(tmp_path, line):
    path = notebook(tmp_path / "0.ipynb", parameters=f"seed = 0\n{line}")
    with pytest.raises(ValueError, match="next cell"):
        parameters.defaults(path)


def test_parameters_are_read_by_many_threads_at_once(tmp_path):
    """Python 3.11's parser fails where one thread's garbage collection lets another parse."""
    path = notebook(
        tmp_path / "0.ipynb",
        parameters="\n".join(f"x{i} = [[{i}], [1]]" for i in range(60)),
    )
    pause = lambda phase, info: time.sleep(3e-4)  # noqa: E731
    before = gc.get_threshold()
    gc.callbacks.append(pause)
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(parameters.defaults, [path] * 80))
    finally:
        gc.callbacks.remove(pause)
        gc.set_threshold(*before)


def test_broken_files_are_named(tmp_path):
    path = notebook(tmp_path / "0.ipynb")
    (tmp_path / "profiles.yaml").write_text("tiny: [1, 2]")
    with pytest.raises(ValueError, match=r"profiles\.yaml must map profile"):
        parameters.overrides(path, "tiny")
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"0\.ipynb is not a notebook"):
        parameters.overrides(path)


def test_profiles_name_notebooks_and_parameters_that_exist():
    folder = Path(uqlab.__file__).parents[1] / "notebooks"
    for notebooks in parameters.profiles(folder / "any").values():
        for stem, values in notebooks.items():
            known = parameters.defaults(parameters.find(stem))
            parameters.checked(values, known, stem)


def test_own_files_are_those_of_the_callers_folder(project):
    (project / "mine.npz").touch()
    (project / "mine.csv.gz").touch()
    here = project.as_posix()
    for given, planned in {
        "mine.npz": f"{here}/mine.npz",
        "mine.csv.gz": f"{here}/mine.csv.gz",
        "./mine.npz[0-3]": f"{here}/mine.npz[0-3]",
        "other.npz": "other.npz",
        "digits": "digits",
        """["mine.npz[1]", 'letters', mine.npz]""": f"""["{here}/mine.npz[1]", 'letters', {here}/mine.npz]""",
    }.items():
        (values,) = parameters.per_notebook(("00",), "quick", {"name": given}).values()
        assert values == {"name": planned}
