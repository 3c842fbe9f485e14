"""The numbers and the figure of the book's text on cheap ensembles, from study 17.

    python tools/cheap_ensembles.py

Runs the study on the committed tables of `notebooks/rows/observatory.ipynb` and keeps
what the text shows, and the verdicts on its predictions, in figures/real/17_observatory.
"""

import json
import shutil
from pathlib import Path

import pandas as pd

from uqlab import runs
from uqlab.core.recording import Record
from uqlab.runs import parameters

FOLDER = Path(__file__).parents[1] / "figures" / "real" / "17_observatory"


def main() -> None:
    """Run the study, then copy its numbers and its figure."""
    done = runs.execute(parameters.find("studies/17"))
    record = Record.read(done)
    (FOLDER / "numbers.json").write_text(
        json.dumps(record.numbers["text"], indent=1) + "\n"
    )
    columns = ["found", "verdict"]
    judged = [
        pd.DataFrame(**record.tables[f"predictions{where}"]).set_axis(columns, axis=1)
        for where in ("", "_near")
    ]
    judged = pd.concat(
        judged, keys=["on clothes", "on Kuzushiji"], names=["set", "prediction"]
    )
    judged.to_csv(FOLDER.with_name("17_cheap_ensembles_predictions.csv"))
    shutil.copy(done / "controls.png", FOLDER)


if __name__ == "__main__":
    main()
