"""What pages import, once for all kernels that are forked from the process that imports this (tests/warm_kernels.py).

The package itself is forgotten again: every kernel imports it anew, and notes which of its files it has imported.
"""

import gc
import os
import sys
from pathlib import Path

from uqlab.runs.kernels import environment

os.environ |= environment(1, Path("nowhere"))  # the number of threads and the backend are read at the import

import ipykernel.kernelapp  # noqa: F401
import ipywidgets  # noqa: F401
import pandas  # noqa: F401
import sklearn.linear_model  # noqa: F401

from uqlab import methods, models, plots, widgets  # noqa: F401

models.embedded()  # imports what transformers loads at the first network

for name in [name for name in sys.modules if f"{name}.".startswith("uqlab.")]:
    del sys.modules[name]

gc.freeze()  # kernels need not look at it, which would copy its memory
