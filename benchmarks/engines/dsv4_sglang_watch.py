"""This package's compressors in a running sglang: which it serves, and bytes beside sglang's.

In eager calls, once `comparing` is set, state and records are set back to what they were before a
call, sglang's own step runs on the same input, and both results are compared. The first page of
records is nobody's: sglang stores padding there. A step on moved input is the planted error.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch

COMPARED = 200  # calls of a kind; each costs two more, and copies of the caches


class RecordWatch:
    """Made before the engine's backend; `watch_v4` or `watch_v41` gets the adapter's module."""

    def __init__(self) -> None:
        self.comparing = False
        self.here: dict[int, bool] = {}  # by compressor, whether it is served here
        self.calls: dict[str, Counter[str]] = defaultdict(Counter)
        self.compared = Counter[str]()
        self.written, self.unlike = 0, 0  # bytes
        self.planted: dict[str, bool] = {}

    def watch_v4(self, adapter: Any) -> None:
        step_of = adapter.FusedStep.__call__

        def call(step: Any, **given: Any) -> None:
            key, plan = id(given["norm"]), _plan(step, given)
            kind = "decode" if plan.is_decode else "prefill"
            bound = step._bound.get(key)
            if bound is None or bound.layer is None or bound.leaves(plan):
                step_of(step, **given)
            else:
                moved = {**given, "kv_score_input": given["kv_score_input"].roll(1, 1)}
                self._beside(
                    kind,
                    [bound.state, bound.pages[1:]],
                    lambda: step_of(step, **given),
                    lambda: step._upstream(**given),
                    lambda: step_of(step, **moved),
                )
            bound = step._bound[key]
            self.here[key] = bound.layer is not None
            is_ours = self.here[key] and not bound.leaves(plan)
            self.calls[kind]["ours" if is_ours else "sglang's"] += 1

        adapter.FusedStep.__call__ = call

    def watch_v41(self, adapter: Any) -> None:
        eager = adapter.V41Steps.eager

        def call(steps: Any, layer: Any, x: Any, req: Any, pos: Any, forward_batch: Any) -> None:
            rest = (req, pos, forward_batch)
            kind = "decode" if forward_batch.forward_mode.is_decode() else "prefill"
            bound = steps._bound.get(layer.layer_id)
            if bound is None or bound.layer is None or not pos.shape[0]:
                eager(steps, layer, x, *rest)
            else:
                state, *pages = bound.tensors
                states = [] if state is None else [state]
                self._beside(
                    kind,
                    [*states, *(tensor[1:] for tensor in pages)],
                    lambda: eager(steps, layer, x, *rest),
                    lambda: steps._upstream["_low_ratio_compress"](layer, x, *rest),
                    lambda: eager(steps, layer, x.roll(1, 1), *rest),
                )
            if (bound := steps._bound.get(layer.layer_id)) is not None:
                self.here[layer.layer_id] = bound.layer is not None
                self.calls[kind]["sglang's" if bound.layer is None else "ours"] += 1

        adapter.V41Steps.eager = call

    def _beside(
        self,
        kind: str,
        tensors: list[torch.Tensor],
        ours: Callable[[], None],
        theirs: Callable[[], None],
        wrong: Callable[[], None],
    ) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        if not self.comparing or capturing or self.compared[kind] >= COMPARED:
            ours()
            return
        self.compared[kind] += 1
        before = [tensor.clone() for tensor in tensors]

        def result(step: Callable[[], None]) -> list[torch.Tensor]:
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
            step()
            return [tensor.clone() for tensor in tensors]

        made, upstream = result(ours), result(theirs)
        for tensors_of in zip(before, made, upstream, strict=True):
            old, one, other = (tensor.view(torch.uint8) for tensor in tensors_of)
            self.written += int(((one != old) | (other != old)).sum())
            self.unlike += int((one != other).sum())
        if not self.planted.get(kind):
            pairs = zip(made, result(wrong), strict=True)
            same = (torch.equal(*(x.view(torch.uint8) for x in pair)) for pair in pairs)
            self.planted[kind] = not all(same)
        for tensor, new in zip(tensors, made, strict=True):
            tensor.copy_(new)

    def report(self) -> dict[str, Any]:
        return {
            "compressors": {
                "here": sum(self.here.values()),
                "left": len(self.here) - sum(self.here.values()),
                "calls": {kind: dict(calls) for kind, calls in self.calls.items()},
            },
            "records": {
                "compared": dict(self.compared),
                "bytes_written": self.written,
                "bytes_unlike_upstream": self.unlike,
                "planted_errors_seen": self.planted,
            },
        }


def _plan(step: Any, given: dict[str, Any]) -> Any:
    """sglang's plan of the step that a call belongs to."""
    return step._backend._get_paged_compress_metadata(given["compress_ratio"])
