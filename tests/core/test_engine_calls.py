"""What differs from the calls that are known here is found before the first step."""

from __future__ import annotations

from typing import Any

import pytest

from backend_core.engines.calls import odd_callee, odd_calls, odd_signature

NEEDED, OPTIONAL = {"q", "k"}, {"out"}


def attend(**call: Any) -> Any: ...


class Layer:
    """An engine's, which makes the calls that `attend` has."""

    def same(self, q: Any, k: Any) -> None:
        attend(q=q, k=k)
        self.attend(q=q, k=k, out=None)

    def more(self, q: Any, k: Any) -> None:
        attend(q=q, k=k, window=3)

    def fewer(self, q: Any) -> None:
        attend(q=q)

    def unnamed(self, q: Any, k: Any) -> None:
        attend(q, k=k)

    def spread(self, q: Any, k: Any, **rest: Any) -> None:
        attend(q=q, k=k, **rest)

    def others(self, q: Any, k: Any) -> None:
        attend(window=3)
        attend(q=q, k=k)

    attend = attend


@pytest.mark.parametrize(
    ("caller", "naming", "reason"),
    [
        (Layer.same, None, None),
        (Layer.others, "q", None),
        (Layer.more, None, "Layer.more's call of attend must have the arguments that are known"),
        (Layer.fewer, None, "here, k differ"),
        (Layer.unnamed, None, "Layer.unnamed must call attend with named arguments alone"),
        (Layer.spread, None, "Layer.spread must call attend with named arguments alone"),
        (Layer.more, "q", "here, window differ"),
        (Layer, None, "here, window differ"),
        (len, None, "cannot be read"),
        (attend, None, "attend must call attend, and calls it nowhere"),
    ],
)
def test_calls_in_the_source(caller: Any, naming: str | None, reason: str | None) -> None:
    odd = odd_calls(caller, "attend", NEEDED, OPTIONAL, naming=naming)
    assert odd is None if reason is None else reason in str(odd)


def test_parameters() -> None:
    assert odd_signature(Layer.same, NEEDED) is None
    assert odd_signature(Layer.same, {"q"}) is None  # k is passed on
    assert odd_signature(Layer.same, {"q"}, set()) is not None
    assert "window differ" in str(odd_signature(Layer.same, {*NEEDED, "window"}))


def test_functions_that_are_called() -> None:
    def grown(q: Any, k: Any, window: int) -> None: ...
    def spare(q: Any, k: Any, window: int = 3) -> None: ...
    def lacking(q: Any) -> None: ...

    assert odd_callee(spare, NEEDED, OPTIONAL) is None
    assert odd_callee(attend, NEEDED, OPTIONAL) is None
    assert "window differ" in str(odd_callee(grown, NEEDED, OPTIONAL))
    assert "k differ" in str(odd_callee(lacking, NEEDED, OPTIONAL))
