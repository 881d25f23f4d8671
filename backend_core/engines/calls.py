"""Whether an engine calls a function with the arguments of the one that stands in its place."""

from __future__ import annotations

from collections.abc import Set


def odd_arguments(
    function: str, got: Set[str], needed: Set[str], optional: Set[str] = frozenset()
) -> str | None:
    """Why a function of an engine cannot be replaced by the one that is known here.

    Args:
        function: its name, and whose it is: ``"sglang's forward_decode"``.
        got: the names that it takes, or is called with.
        needed: the names that must be among them; optional: those that may be.
    """
    odd = (got - needed - optional) | (needed - got)
    if not odd:
        return None
    names = ", ".join(sorted(odd))
    return f"{function} must have the arguments that are known here, {names} differ"
