"""Packages that only an extra installs: `with extra("notebooks"): import pandas`."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Import inside the block; ImportError says which extra holds what is missing.

    uqlab of the package index is another package, so it names a clone or a wheel.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error.name} is not installed, which the extra {name!r} holds: "
            f"pip install '.[{name}]' in a clone of uqlab, or "
            f"pip install 'WHEEL[{name}]' with the path of its wheel",
            name=error.name,
        ) from error
