"""Moved: `uqlab.spectra` is `uqlab.analysis.spectra`; this name goes with version 0.3."""

import warnings

from uqlab.analysis.spectra import *  # noqa: F403

warnings.warn(
    "uqlab.spectra is uqlab.analysis.spectra", DeprecationWarning, stacklevel=2
)
