"""Functions of ours in the place of an engine's, put there once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_OURS = "_kda_dsv4"  # on a function of ours
_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_ours(function: Any) -> bool:
    """Whether a function is one that `in_place_of` has put somewhere."""
    return hasattr(function, _OURS)


def in_place_of(owner: Any, name: str) -> Callable[[_Function], _Function]:
    """Put the decorated function in the place of ``owner.name``, a function of an engine's; nothing
    changes where one of ours is there already.

    Args:
        owner: a module or a class.
    """
    upstream = getattr(owner, name)

    def put(ours: _Function) -> _Function:
        if not is_ours(upstream):
            setattr(functools.update_wrapper(ours, upstream), _OURS, True)
            setattr(owner, name, ours)
        return ours

    return put
