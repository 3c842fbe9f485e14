"""What pages import, and the package: once for all kernels that are forked from the process that imports this.

tests/warm_kernels.py starts it. A kernel of a user imports the package itself, and so do those of the tests that look
at what a run notes of its code.
"""

import gc
import io
import os
from pathlib import Path

from uqlab.runs.kernels import environment

os.environ |= environment(
    1, Path("nowhere")
)  # the number of threads and the backend are read at the import

import ipykernel.kernelapp  # noqa: F401
import IPython.core.oinspect  # noqa: F401
import ipywidgets  # noqa: F401
import pandas.io.formats.style  # noqa: F401
import sklearn.linear_model  # noqa: F401

from uqlab import (
    data,
    models,
    plots,
)

models.embedded()  # imports what transformers loads at the first network
for name in (
    "digits",
    "ambiguous-digits",
    "letters",
    "glyphs",
    "mnist-mini",
    "fashion-mini",
):
    for split in ("train", "test"):
        data.load(name, split)  # made in a second, and kept
for kind in (
    "png",
    "pdf",
):  # imports what painters load at the first figure, and reads the fonts
    figure, axes = plots.figure()
    axes.set(xscale="log", title="$x^2$")
    figure.savefig(io.BytesIO(), format=kind)
    plots.plt.close(figure)

gc.freeze()  # kernels need not look at it, which would copy its memory
