"""The `uqlab` command, also `python -m uqlab.runs`: without its extra it says so."""

import sys

from uqlab.core.extras import extra


def main() -> None:
    """Run the command line; the exit code is 1 without the packages that it needs."""
    try:
        with extra("notebooks"):
            from uqlab.runs.cli import main as command
    except ImportError as error:
        sys.exit(f"uqlab: {error}")
    command()


if __name__ == "__main__":
    main()
