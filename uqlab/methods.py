"""The old place of `uqlab.study.methods`, for one release."""

import warnings

from uqlab.study.methods import *  # noqa: F403

warnings.warn("uqlab.methods is uqlab.study.methods", DeprecationWarning, stacklevel=2)
