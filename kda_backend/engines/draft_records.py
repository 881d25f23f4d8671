"""Whether an engine's drafts are kept as records or as the state after each token."""

from __future__ import annotations

from backend_core.strict import choice
from backend_core.target import Target

VARIABLE = "KDA_DSV4_DRAFT_RECORDS"
"""``1`` asks for records on every GPU and of drafts of any length, ``0`` for states."""


def asked() -> bool | None:
    """The user's wish; ``None`` where that is left to `wanted`.

    Raises:
        ValueError: the variable has another value than 0 or 1.
    """
    return choice(VARIABLE)


def wanted(target: Target, tokens: int, fewest: int) -> bool:
    """Whether drafts of so many tokens are kept as records: as the user says, else on Hopper.

    Args:
        tokens: with the one that is verified besides; fewest: from which on a step with its commit
            was measured to be faster than with states.
    """
    if (wish := asked()) is not None:
        return wish
    return target.arch.startswith("sm90") and tokens >= fewest
