"""How an ensemble was made: the call of its method, which a folder can hold."""

import functools
import inspect
from typing import Any, TypeVar

Method = TypeVar("Method")
METHODS: dict[str, Any] = {}  # what a folder may ask for


def recorded(make: Method) -> Method:
    """Let ensembles note how `make(network, ...)` was called."""
    method: Any = make
    signature = inspect.signature(method)

    @functools.wraps(method)
    def made(*args, **named):
        ensemble = method(*args, **named)
        call = signature.bind(*args, **named)
        call.apply_defaults()
        (_, network), *settings = call.arguments.items()
        ensemble.source = getattr(network, "source", {})
        return ensemble.with_recipe({"method": method.__name__, **dict(settings)})

    METHODS[method.__name__] = made
    return made  # type: ignore
