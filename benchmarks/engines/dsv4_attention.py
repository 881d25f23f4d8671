"""The attention of a DeepSeek-V4 or V4.1 in a running engine, and ours compared with FlashMLA's.

Made before the engine, as calls are seen in captures and eager steps; a graph's replays call
nothing, and have the attention that its capture had. In eager calls outside of captures FlashMLA
runs after ours on the same input, with queries padded to its 64 heads, and rows of the two outputs
are compared. Both engines' adapters make FlashMLA's calls by one function, `make`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from mla_backend.engines.seam_list import DECODE, PREFILL

FLASHMLA_HEADS = 64
CLOSE = 0.02  # of a row's largest channel; bf16 results of two orders of summation
COMPARED = 200  # calls of a phase; each costs a second run
PHASES = {DECODE: "decode", PREFILL: "prefill"}


class AttentionWatch:
    """Counts calls by phase and kernel; while `comparing`, compares this package's with FlashMLA's.

    Who makes it has the adapter's calls pass through `ours`, and FlashMLA's through `theirs`.
    """

    def __init__(self) -> None:
        self.comparing = False
        self.calls: dict[str, Counter[str]] = defaultdict(Counter)
        self.captured: dict[str, set[int]] = defaultdict(set)
        self.rows = {"decode": [0, 0], "prefill": [0, 0]}  # close, and of how many
        self.worst = {"decode": 0.0, "prefill": 0.0}
        self.compared = Counter[str]()
        self._upstream: dict[str, Callable[..., Any]] = {}

    def ours(self, adapter: Any) -> None:
        """Count the calls that this package's module for an engine makes, and compare them."""
        make = adapter.make

        def made(layer: Any, name: str, call: dict[str, Any]) -> Any:
            found = make(layer, name, call)
            self._seen(PHASES[name], "ours", call["q"])
            self._compare(name, call, found[0])
            return found

        adapter.make = made

    def theirs(self, name: str, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """FlashMLA's function of a name, counted; ours are compared with the last one given."""
        self._upstream[name] = upstream

        def call(**arguments: Any) -> Any:
            self._seen(PHASES[name], "flashmla", arguments["q"])
            return upstream(**arguments)

        return call

    def _seen(self, phase: str, kernel: str, q: torch.Tensor) -> None:
        self.calls[phase][kernel] += 1
        if torch.cuda.is_current_stream_capturing():
            self.captured[f"{phase} {kernel}"].add(q.shape[0])

    def _compare(self, name: str, call: dict[str, Any], out: torch.Tensor) -> None:
        phase = PHASES[name]
        if torch.cuda.is_current_stream_capturing() or not self.comparing:
            return
        if self.compared[phase] >= COMPARED:
            return
        self.compared[phase] += 1
        q, sinks = call["q"], call["attn_sink"]
        heads = q.shape[-2]
        wide = q.new_zeros(*q.shape[:-2], FLASHMLA_HEADS, q.shape[-1])
        wide[..., :heads, :] = q
        padded = sinks.new_full((FLASHMLA_HEADS,), -float("inf"))
        padded[:heads] = sinks
        again = {**call, "q": wide, "attn_sink": padded}
        if "out" in call:
            again["out"] = torch.empty_like(wide)
        if name == DECODE:  # a schedule of its own, which FlashMLA makes when it finds none
            again["tile_scheduler_metadata"] = type(call["tile_scheduler_metadata"])()
        found = self._upstream[name](**again)
        room = again["out"] if "out" in call else found[0]
        want = room[..., :heads, :].float().flatten(0, -2)
        difference = (out.float().flatten(0, -2) - want).abs().amax(1)
        share = difference / want.abs().amax(1).clamp_min(1e-6)
        self.rows[phase][0] += int((share <= CLOSE).sum())
        self.rows[phase][1] += share.numel()
        self.worst[phase] = max(self.worst[phase], float(share.max()))

    def report(self) -> dict[str, Any]:
        return {
            "calls": {phase: dict(calls) for phase, calls in self.calls.items()},
            "captured": {what: sorted(sizes) for what, sizes in self.captured.items()},
            "rows": self.rows,
            "worst": self.worst,
        }
