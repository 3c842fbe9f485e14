"""How an ensemble was made: the call of its method, which a folder can hold."""

import functools
import inspect
from typing import Any, TypeVar

Method = TypeVar("Method")
METHODS: dict[str, Any] = {}  # what a folder may ask for


def recorded(make: Method) -> Method:
    """Let ensembles note how `make(network, ...)` was called.

    `from_pretrained` calls it again: decorate a method of your own to load its
    ensembles by `from_pretrained(folder, network)`.
    """
    method: Any = make
    signature = inspect.signature(method)

    @functools.wraps(method)
    def made(*args, **named):
        ensemble = method(*args, **named)
        call = signature.bind(*args, **named)
        call.apply_defaults()
        (_, network), *settings = call.arguments.items()
        ensemble.source = getattr(network, "source", {})
        recipe = {"method": method.__name__, **dict(settings)}
        recipe.pop("members", None)
        return ensemble.with_recipe(recipe)

    METHODS[method.__name__] = made
    return made  # type: ignore
