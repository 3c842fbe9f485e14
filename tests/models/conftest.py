"""The scripts of tools/ that made the networks in the package are imported here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))
