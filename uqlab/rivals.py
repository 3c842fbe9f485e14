"""The old place of `uqlab.study.baselines`, for one release."""

import warnings

from uqlab.study.baselines import *  # noqa: F403

warnings.warn("uqlab.rivals is uqlab.study.baselines", DeprecationWarning, stacklevel=2)
