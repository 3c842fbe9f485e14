"""Files of `study` are found at their old places, with a warning, for one release."""

import importlib
import sys

import pytest

from uqlab import study

NEW = {"acquire", "baselines", "check", "decide", "Estimate", "Evaluation", "evaluate"}
OLD = {name: name for name in study.__all__ if name not in NEW} | {
    "rivals": "baselines"
}


@pytest.mark.parametrize("old", OLD)
def test_an_old_place_warns_and_has_every_public_name(old):
    new = getattr(study, OLD[old])
    sys.modules.pop(f"uqlab.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"uqlab.{old} is uqlab.study"):
        module = importlib.import_module(f"uqlab.{old}")
    public = {name for name in vars(new) if not name.startswith("_")}
    assert all(getattr(module, name) is getattr(new, name) for name in public)
