"""Slides say what the page and its run say: questions, guesses above their figures, claims; nothing from outside."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

ROOT = Path(__file__).parents[1]
CELLS = [
    new_markdown_cell(
        "# 09 · A page\n\n**Question.** Why\nnot?\n\n**Takes** a minute."
    ),
    new_code_cell('x = "curve"'),
    new_markdown_cell(
        "Before.\n\n## A section\n\nProse.\n\n$$a = b$$\n\n**Guess first.** which is\nlarger?\n\nMore."
    ),
    new_code_cell('plots.save(fig, "curve", "A curve.")'),
    new_markdown_cell(
        "**Nothing of it was ever lost.**\n\n## The paper and this run\n\nNot shown."
    ),
    new_code_cell('plots.save(fig, "late", "Late.")'),
]


@pytest.fixture
def made(monkeypatch, tmp_path):
    """The module that makes slides, with the results of one run."""
    spec = importlib.util.spec_from_file_location(
        "slides_conf", ROOT / "book" / "slides" / "conf.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(module)
    figures = {name: {"caption": f"Of {name}."} for name in ("curve", "late")}
    claims = {
        "a": {"sentence": "It holds (margin: a ratio)", "holds": True},
        "b": {"sentence": "So", "holds": False},
    }
    run = tmp_path / "run" / "09_page"
    run.mkdir(parents=True)
    (run / "results.json").write_text(
        json.dumps({"figures": figures, "claims": claims})
    )
    (run / "curve.png").write_bytes(b"a picture")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "run")
    return module


def test_a_page_becomes_slides(made, tmp_path):
    text = made.slides({"cells": CELLS}, "09_page", tmp_path)
    shown = re.sub(r":::.+?:::\n\n", "", text, flags=re.DOTALL).split("\n\n")
    assert shown == [
        "# 09 · A page", "## The question", "Why\nnot?",
        "## A section", "$$a = b$$", "### A section", "**Guess first.** Which is\nlarger?",
        "### A section", "![Of curve.](09_page/curve.png)", "Of curve.",
        "### A section", "**Nothing of it was ever lost.**",
        "## What held in this run (✓), and what did not (✗)", "- ✓ It holds\n- ✗ So\n",
    ]  # fmt: skip
    assert "Prose." in text, "the prose is in the notes"
    assert "Not shown" not in text
    assert (tmp_path / "09_page" / "curve.png").read_bytes() == b"a picture"


def test_slides_open_without_a_network(tmp_path):
    options = [
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "revealjs",
        "-c",
        "book/slides",
        tmp_path / "source",
        tmp_path / "html",
    ]
    (tmp_path / "source").mkdir()
    subprocess.run([sys.executable, "-m", "sphinx", *options], cwd=ROOT, check=True)
    pages = [path.stem for path in ROOT.glob("notebooks/0[0-4]_*.ipynb")]
    assert {path.stem for path in tmp_path.glob("html/*.html")} >= {"index", *pages}
    for path in tmp_path.glob("html/*.html"):
        loaded = re.findall(
            r"<(?:script|link|img)[^>]+(?:src|href)=\"([^\"]+)\"", path.read_text()
        )
        assert loaded
        assert [
            link
            for link in loaded
            if "//" in link or not (path.parent / link.split("?")[0]).exists()
        ] == []
