"""Whether an engine calls a function with the arguments of the one that stands in its place.

All of it is asked at load: what is refused there runs on the engine's own code, and what differs in
the first step ends the server.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Set
from typing import Any


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


def odd_signature(
    function: Callable[..., Any], needed: Set[str], optional: Set[str] | None = None
) -> str | None:
    """`odd_arguments` of those that an engine's function takes, but for ``self``.

    Args:
        optional: ``None`` stands for any: what is not needed is passed on.
    """
    got = inspect.signature(function).parameters.keys() - {"self"}
    known = got if optional is None else optional
    return odd_arguments(function.__qualname__, got, needed, known)


def odd_callee(function: Callable[..., Any], needed: Set[str], optional: Set[str]) -> str | None:
    """`odd_arguments` of those that an engine's function takes; of the others it must not ask any.

    A function that takes all names, or says of none, is not odd.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a compiled function
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    spare = {p.name for p in parameters if p.default is not inspect.Parameter.empty}
    name = getattr(function, "__qualname__", repr(function))
    return odd_arguments(name, {p.name for p in parameters}, needed, optional | spare)


def odd_calls(
    caller: Callable[..., Any],
    name: str,
    needed: Set[str],
    optional: Set[str],
    *,
    naming: str | None = None,
) -> str | None:
    """Why the calls of ``name`` that an engine's function or class makes cannot be made here, from
    its source.

    Args:
        needed, optional: the names of arguments, as `odd_arguments` takes them.
        naming: an argument; calls without it are passed over.
    """
    who = caller.__qualname__
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(caller)))
    except (OSError, TypeError, SyntaxError):
        return f"the source of {who}, which calls {name}, cannot be read"
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and _called(x) == name]
    if naming is not None:
        calls = [call for call in calls if naming in {given.arg for given in call.keywords}]
    if not calls:
        return f"{who} must call {name}, and calls it nowhere"
    for call in calls:
        names = {given.arg for given in call.keywords if given.arg is not None}
        if call.args or len(names) < len(call.keywords):
            return f"{who} must call {name} with named arguments alone"
        if (odd := odd_arguments(f"{who}'s call of {name}", names, needed, optional)) is not None:
            return odd
    return None


def _called(call: ast.Call) -> str | None:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None
