"""Slides say what the page and its run say: questions, guesses above their figures, claims; nothing from outside."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

ROOT = Path(__file__).parents[1]
CELLS = [
    new_markdown_cell("# 09 · A page\n\n**Question.** Why\nnot?\n\n**Takes** a minute."),
    new_code_cell('x = "curve"'),
    new_markdown_cell("## A section\n\nProse.\n\n$$a = b$$\n\n**Guess first.** which is\nlarger?\n\nMore."),
    new_code_cell('plots.save(fig, "curve", "A curve.")'),
    new_markdown_cell("## Paper and this run\n\nNot shown."),
    new_code_cell('plots.save(fig, "late", "Late.")'),
]  # fmt: skip


def test_a_page_becomes_slides(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    slides = runpy.run_path(str(ROOT / "book" / "slides" / "conf.py"))["slides"]
    figures = {name: {"caption": f"Of {name}."} for name in ("curve", "late")}
    claims = {
        "a": {"sentence": "It holds (margin: a ratio)", "holds": True},
        "b": {"sentence": "So", "holds": False},
    }
    run = tmp_path / "run" / "09_page"
    run.mkdir(parents=True)
    recorded = {"figures": figures, "claims": claims}
    (run / "results.json").write_text(json.dumps(recorded))
    (run / "curve.png").write_bytes(b"a picture")
    monkeypatch.setitem(slides.__globals__, "RESULTS", tmp_path / "run")
    text = slides({"cells": CELLS}, "09_page", tmp_path)
    shown = re.sub(r":::.+?:::\n\n", "", text, flags=re.DOTALL).split("\n\n")
    assert shown == [
        "# 09 · A page", "## The question", "Why\nnot?",
        "## A section", "$$a = b$$", "### A section", "**Guess first.** Which is\nlarger?",
        "### A section", "![Of curve.](09_page/curve.png)", "Of curve.",
        "## What held in this run (✓), and what did not (✗)", "- ✓ It holds\n- ✗ So\n",
    ]  # fmt: skip
    assert "Prose." in text, "the prose is in the notes"
    assert (tmp_path / "09_page" / "curve.png").read_bytes() == b"a picture"


@pytest.mark.slow
def test_slides_open_without_a_network(tmp_path):
    (tmp_path / "source").mkdir()
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
    command += ["-b", "revealjs", "-c", "book/slides"]
    folders = [tmp_path / "source", tmp_path / "html"]
    subprocess.run([*command, *folders], cwd=ROOT, check=True)
    lessons = {path.stem for path in ROOT.glob("notebooks/0[0-4]_*.ipynb")}
    made = [*(tmp_path / "html").glob("*.html")]
    assert {path.stem for path in made} >= {"index", *lessons}
    for path in made:
        tags = r"<(?:script|link|img)[^>]+(?:src|href)=\"([^\"]+)\""
        loaded = [link.split("?")[0] for link in re.findall(tags, path.read_text())]
        assert loaded
        assert all("//" not in x and (path.parent / x).exists() for x in loaded)
