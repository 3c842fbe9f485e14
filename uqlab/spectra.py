"""The old place of `uqlab.analysis.spectra`, for one release."""

import warnings

from uqlab.analysis.spectra import *  # noqa: F403

warnings.warn(
    "uqlab.spectra is uqlab.analysis.spectra", DeprecationWarning, stacklevel=2
)
