"""sglang's FA3 backend with the MLA decodes of this family.

Cache, page tables, prefills and CUDA graphs are the base class's, whose state an object of the
subclass takes over. A decode step is planned here once for all layers, from the lengths and the
page table that the base class has made, where the batch is one in which this family is ahead; then
the one call of FlashAttention that each layer makes is made here. Other steps are the base class's
whole. Which of the two a step is follows from the number of requests alone, which a CUDA graph is
captured for; planning runs outside of the graph, before each replay, into tensors that belong to
that number.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from sglang.srt.layers.attention import flashattention_backend
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

from backend_core.engines.in_place import in_place_of
from backend_core.target import detect_target
from mla_backend.engines.mla_decoder import MlaDecoder, MlaStep
from mla_backend.engines.sglang_facts import KERNELS, mla_layers

_CALL = "flash_attn_with_kvcache"
_step: ContextVar[MlaStep | None] = ContextVar("step", default=None)


class SplitKvAttnBackend(FlashAttentionBackend):  # type: ignore[misc]
    """Takes the place of a `FlashAttentionBackend` that sglang has built.

    Args:
        runner: sglang's ModelRunner; upstream: its backend, which is not used beside this one.
    """

    def __init__(self, runner: Any, upstream: FlashAttentionBackend) -> None:
        self.__dict__.update(upstream.__dict__)
        self._planned: MlaStep | None = None
        device = torch.device(self.device)
        self.decoder = MlaDecoder(
            detect_target(device),
            device,
            heads=mla_layers(runner.model)[0].tp_q_head_num,
            page_size=self.page_size,
            kernel=KERNELS[FlashAttentionBackend.__name__],
            query_tokens=(1,),
            max_requests=runner.req_to_token_pool.size,
        )
        self.decoder.warm_up()
        _install()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """A step without a CUDA graph."""
        super().init_forward_metadata(forward_batch)
        self._plan(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture, and before each replay."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        self._plan(forward_batch)

    def _plan(self, forward_batch: Any) -> None:
        self._planned = None
        # an idle rank replays the graphs of decodes
        if not forward_batch.forward_mode.is_decode_or_idle():
            return
        lengths = self.forward_metadata.cache_seqlens_int32
        if self.decoder.covers(lengths.shape[0], 1):
            self._planned = self.decoder.step(lengths, self.forward_metadata.page_table, 1)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Any:
        """``options``: those of the release's MLA layers, which all come by name."""
        step = self._planned
        # padding may add tokens that belong to no request
        if step is not None and q.shape[0] != step.plan.requests:
            step = None
        token = _step.set(step)
        try:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **options)
        finally:
            _step.reset(token)


def _install() -> None:
    """Let the backend's calls of FlashAttention ask for a planned step first."""
    upstream = getattr(flashattention_backend, _CALL)

    @in_place_of(flashattention_backend, _CALL)
    def flash_attn_with_kvcache(*args: Any, **call: Any) -> Any:
        step = _step.get()
        return upstream(*args, **call) if step is None else attend(step, call)


def attend(step: MlaStep, call: dict[str, Any]) -> torch.Tensor:
    """The call of FlashAttention that a layer makes in a planned step.

    Raises:
        ValueError: a tensor is not as `MlaStep` takes it, or not the step's; nothing has been
            written then.
    """
    lengths = call["cache_seqlens"]
    if lengths.data_ptr() != step.plan.lengths.data_ptr():
        raise ValueError("cache_seqlens must be the lengths that the step was planned for")
    if call.get("return_softmax_lse") or call.get("k_descale") is not None:
        raise ValueError("return_softmax_lse and k_descale are not served")
    out, _ = step.attend(
        call["qv"],
        call["q"],
        call["v_cache"].squeeze(2),
        call["k_cache"].squeeze(2),
        call["softmax_scale"],
    )
    return out
