"""The attention of a DeepSeek-V4 or V4.1 in a running vLLM, and ours compared with FlashMLA's.

Made before the engine, as calls are seen in captures and eager steps; a graph's replays call
nothing, and have the attention that its capture had. In eager calls outside of captures FlashMLA
runs after ours on the same input, with queries padded to its 64 heads, and rows of the two outputs
are compared.
"""

from __future__ import annotations

import importlib
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from mla_backend.engines import vllm_sparse
from mla_backend.engines.sparse_layer import SparseLayer

FLASHMLA_HEADS = 64
CLOSE = 0.02  # of a row's largest channel; bf16 results of two orders of summation
COMPARED = 200  # calls of a phase; each costs a second run


class AttentionWatch:
    """Counts calls by phase and kernel, and compares those of this package with FlashMLA's."""

    def __init__(self, model: str = "v4") -> None:
        flashmla: Any = importlib.import_module(f"vllm.models.deepseek_{model}.nvidia.flashmla")
        self._layer = flashmla.DeepseekV4FlashMLAAttention
        self.calls: dict[str, Counter[str]] = defaultdict(Counter)
        self.captured: dict[str, set[int]] = defaultdict(set)
        self.rows = {"decode": [0, 0], "prefill": [0, 0]}  # close, and of how many
        self.worst = {"decode": 0.0, "prefill": 0.0}
        self.compared = Counter[str]()
        self._upstream = {
            "decode": flashmla.flash_mla_with_kvcache,
            "prefill": flashmla.flash_mla_sparse_fwd,
        }
        flashmla.flash_mla_with_kvcache = self._theirs("decode")
        flashmla.flash_mla_sparse_fwd = self._theirs("prefill")
        self._kept = (SparseLayer.decode, SparseLayer.prefill)
        watch = self

        def decode(self: Any, q: Any, window: Any, extra: Any, **options: Any) -> Any:
            out = watch._kept[0](self, q, window, extra, **options)
            watch._seen("decode", "ours", q)
            watch._compare(
                "decode",
                out,
                lambda wide, sinks, room: watch._upstream["decode"](
                    q=wide,
                    k_cache=window.cache.unsqueeze(2),
                    block_table=None,
                    cache_seqlens=None,
                    head_dim_v=512,
                    tile_scheduler_metadata=flashmla_schedule(),
                    is_fp8_kvcache=True,
                    indices=window.indices,
                    topk_length=window.lengths,
                    softmax_scale=options["scale"],
                    attn_sink=sinks,
                    extra_k_cache=extra.cache.unsqueeze(2),
                    extra_indices_in_kvcache=extra.indices,
                    extra_topk_length=extra.lengths,
                    out=room,
                ),
                q,
                options["sinks"],
            )
            return out

        def prefill(self: Any, q: Any, rows: Any, **options: Any) -> Any:
            out = watch._kept[1](self, q, rows, **options)
            watch._seen("prefill", "ours", q)
            watch._compare(
                "prefill",
                out,
                lambda wide, sinks, room: watch._upstream["prefill"](
                    q=wide.squeeze(1),
                    kv=rows.cache.unsqueeze(1),
                    indices=rows.indices,
                    sm_scale=options["scale"],
                    attn_sink=sinks,
                    topk_length=rows.lengths,
                    out=room.squeeze(1),
                ),
                q,
                options["sinks"],
            )
            return out

        SparseLayer.decode = decode  # type: ignore[method-assign]
        SparseLayer.prefill = prefill  # type: ignore[method-assign]

    def _theirs(self, phase: str) -> Any:
        def call(**arguments: Any) -> Any:
            self._seen(phase, "flashmla", arguments["q"])
            return self._upstream[phase](**arguments)

        return call

    def _seen(self, phase: str, kernel: str, q: torch.Tensor) -> None:
        if kernel == "ours" and vllm_sparse._layer.get() is None:
            return  # the warm-up at load
        self.calls[phase][kernel] += 1
        if torch.cuda.is_current_stream_capturing():
            self.captured[f"{phase} {kernel}"].add(q.shape[0])

    def _compare(
        self, phase: str, out: Any, theirs: Callable[..., Any], q: Any, sinks: Any
    ) -> None:
        skipped = torch.cuda.is_current_stream_capturing() or vllm_sparse._layer.get() is None
        if skipped or self.compared[phase] >= COMPARED:
            return
        self.compared[phase] += 1
        tokens, _, heads, width = q.shape
        wide = q.new_zeros(tokens, 1, FLASHMLA_HEADS, width)
        wide[:, :, :heads] = q
        padded = sinks.new_full((FLASHMLA_HEADS,), -float("inf"))
        padded[:heads] = sinks
        room = torch.empty_like(wide)
        theirs(wide, padded, room)
        want = room[:, :, :heads].float().flatten(0, 2)
        difference = (out.float().flatten(0, 2) - want).abs().amax(1)
        share = difference / want.abs().amax(1).clamp_min(1e-6)
        self.rows[phase][0] += int((share <= CLOSE).sum())
        self.rows[phase][1] += share.numel()
        self.worst[phase] = max(self.worst[phase], float(share.max()))

    def report(self, model: Any) -> dict[str, Any]:
        layers = Counter(
            type(module).__name__
            for name, module in model.named_modules()
            if isinstance(module, self._layer)
        )
        return {
            "layers": dict(layers),
            "calls": {phase: dict(calls) for phase, calls in self.calls.items()},
            "captured": {what: sorted(sizes) for what, sizes in self.captured.items()},
            "rows": self.rows,
            "worst": self.worst,
        }


def flashmla_schedule() -> Any:
    from vllm.v1.attention.ops.flashmla import get_mla_metadata

    return get_mla_metadata()[0]
