"""`python -m uqlab.runs` is the `uqlab` command."""

from uqlab.runs.cli import main

main()
