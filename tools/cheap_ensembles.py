"""The numbers and the figure of the book's text on cheap ensembles, from study 17.

    python tools/cheap_ensembles.py

Runs the study on the committed tables of `notebooks/rows/observatory.ipynb` and keeps
what the text shows, in figures/real/17_observatory.
"""

import json
import shutil
from pathlib import Path

from uqlab import runs
from uqlab.core.recording import Record
from uqlab.runs import parameters

FOLDER = Path(__file__).parents[1] / "figures" / "real" / "17_observatory"


def main() -> None:
    """Run the study, then copy its numbers and its figure."""
    done = runs.execute(parameters.find("studies/17"))
    numbers = Record.read(done).numbers["text"]
    (FOLDER / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")
    shutil.copy(done / "controls.png", FOLDER)


if __name__ == "__main__":
    main()
