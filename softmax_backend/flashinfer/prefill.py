"""FlashInfer 0.7.2's ``BatchPrefillWithPagedKVCacheWrapper``: the same ``plan`` and ``run``.

16-bit caches. LSE [T, H] in base 2, as FlashInfer's, unless ``run`` is asked for another. What is
not served is refused in one sentence; arguments that steer FlashInfer's own kernels change nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from backend_core.contracts import expect_device, expect_shape
from softmax_backend.block_sparse import block_sparse_attention, default_blocks
from softmax_backend.flashinfer import encoding
from softmax_backend.flashinfer.encoding import Encoding
from softmax_backend.flashinfer.prefill_plan import (
    GraphBuffers,
    Settings,
    checked_mask,
    checked_requests,
    planned,
)
from softmax_backend.flashinfer.sparse import DataType, as_dtype
from softmax_backend.flashinfer.workspace import check_workspaces
from softmax_backend.plan.block_plan import BlockPlan
from softmax_backend.variants import variant as variants
from softmax_backend.variants.variant import SOFTMAX, Variant


class BatchPrefillWithPagedKVCacheWrapper:
    """Causal, full or masked attention of ragged queries over paged keys.

    With ``use_cuda_graph`` every plan is written into the memory of the first, and what ``run``
    launches reads nothing else: a captured ``run`` serves the plan that was made last. Plan outside
    of the graph, since it reads lengths on the host, and once before the capture, with as many
    query tokens as any later plan has. Later plans have as many requests and the same settings.
    Output rows of query tokens beyond the planned ones are 0.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        """Args:
        float_workspace_buffer: only its device is used.
        kv_layout: of the cache: "NHD", [pages, page size, Hkv, D], or "HND", [pages, Hkv, page
            size, D].
        qo_indptr_buf, paged_kv_indptr_buf: with ``use_cuda_graph``, int32 [S + 1];
            paged_kv_last_page_len_buf: [S]; paged_kv_indices_buf: as long as the most pages of a
            plan. Without it they are not used.
        custom_mask_buf, mask_indptr_buf: with ``use_cuda_graph``, where plans have a mask: uint8,
            as long as the longest packed mask, and int32 [S + 1]. Their lengths alone are used.
        jit_args: must be ``None``: variants are functions here, see ``softmax_backend.variants``.

        The other arguments are taken for FlashInfer's sake.

        Raises:
            ValueError: an argument is not as described, or not served.
        """
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f'kv_layout must be "NHD" or "HND", got {kv_layout!r}')
        if jit_args is not None or variant_owns_mask:
            raise ValueError(
                "jit_args must be None and variant_owns_mask False here: give a variant to "
                "softmax_backend"
            )
        self.device = float_workspace_buffer.device
        buffers = (
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )
        mask_buffers = (custom_mask_buf, mask_indptr_buf)
        self._graph = GraphBuffers(buffers, mask_buffers, self.device) if use_cuda_graph else None
        self._kv_layout = kv_layout
        self._plan: BlockPlan | None = None
        self._settings: Settings | None = None
        self._tokens = 0
        self._placed: Tensor | None = None
        self._table: tuple[Encoding, Tensor] | None = None
        self._slopes: Tensor | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._graph is not None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        """Take FlashInfer's workspaces, which are neither kept nor used: the plan stays.

        Raises:
            ValueError: a buffer is on another device than the wrapper.
        """
        check_workspaces(self.device, float_workspace_buffer, int_workspace_buffer)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DataType = "float16",
        kv_data_type: DataType | None = None,
        o_data_type: DataType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """As FlashInfer's: ``qo_indptr`` [S + 1], the cache's CSR ``paged_kv_indptr`` [S + 1],
        ``paged_kv_indices`` and ``paged_kv_last_page_len`` [S]. Reads the lengths on the host.

        Args:
            custom_mask: bool, [queries, keys] of each request one after another, flattened; then
                ``causal`` is without meaning, and ``window_left`` holds besides.
            packed_custom_mask: the same as ``segment_packbits`` packs it, lowest bit first and each
                request from a byte of its own; goes before ``custom_mask``.
            pos_encoding_mode, rope_scale, rope_theta: see ``softmax_backend.flashinfer.encoding``.
            max_sequence_kv: with ``use_cuda_graph`` the most keys of a request in any plan; by
                default as many as the buffer's pages hold.

        Raises:
            ValueError: an argument is malformed or not served, or does not fit the memory that CUDA
                graphs keep; the plan before is as it was then.
        """
        if (prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr) != (None, None, None):
            raise ValueError("prefix_len_ptr and the positions in items must be None here")
        is_masked = custom_mask is not None or packed_custom_mask is not None
        if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
            raise ValueError(
                f"num_qo_heads must be a multiple of {num_kv_heads}, got {num_qo_heads}"
            )
        dtype = as_dtype(q_data_type)
        for name, given in (("kv_data_type", kv_data_type), ("o_data_type", o_data_type)):
            if given is not None and as_dtype(given) != dtype:
                raise ValueError(f"{name} must be {dtype} as q_data_type is, got {given}")
        settings = Settings(
            num_qo_heads,
            num_kv_heads,
            (head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo),
            page_size,
            causal,
            is_masked,
            window_left,
            encoding.checked(
                pos_encoding_mode, rope_scale, rope_theta, head_dim_qk, logits_soft_cap
            ),
            variants.soft_cap(logits_soft_cap).value if logits_soft_cap else 0.0,
            head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            dtype,
        )
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        requests = checked_requests(arrays, page_size)
        if pos_encoding_mode == "ROPE_LLAMA" and bool((requests.kv_lens < requests.q_lens).any()):
            raise ValueError("every request must have as many keys as queries with ROPE_LLAMA")
        mask = checked_mask(custom_mask, packed_custom_mask, requests, self.device)
        if self._graph is not None:
            self._graph.check(requests, settings, max_sequence_kv)
        block_m, block_n = default_blocks(self.device, head_dim_qk)
        blocks = block_m, min(block_n, 64)
        plan = planned(requests, mask, settings, blocks, self.device)
        keys = int(requests.kv_lens.max())
        if self._graph is None:
            self._plan, self._placed = plan, requests.placed().to(self.device)
        else:
            self._plan = self._graph.write(requests, settings, plan)
            self._placed, keys = self._graph.placed, self._graph.keys
        self._settings, self._tokens = settings, requests.tokens
        self._encode(settings.encoding, -(-max(keys, 1) // blocks[1]) * blocks[1])

    begin_forward = plan

    def end_forward(self) -> None:
        """There is nothing to end."""

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: None = None,
        skip_softmax_threshold_scale_factor: None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of q [T, H, D] to the cache, a pair of tensors or one [pages, 2, ...].

        Args:
            q_scale, k_scale: multiply the logits, ``v_scale`` the output.
            lse: written, and with ``return_lse`` returned, in the layout that is asked for.
            lse_base: "log2" or "ln"; lse_layout: "NH" or "HN", LSE [T, H] or [H, T].
            window_left: as planned, or ``None``.
            sinks: float32 [H], one more logit for each head, with value 0.
            kv_cache_sf, skip_softmax_threshold_scale_factor: must be ``None``; use_fp16_softmax and
                uses_spcompress steer kernels of FlashInfer's.

        Returns:
            Output [T, H, DV]; with ``return_lse`` also LSE, float32, without sinks. Under ALIBI the
            logits are FlashInfer's, whose queries are counted from the request's first.

        Raises:
            ValueError: an argument is not as described or not served; nothing was written.
        """
        plan, settings = self._plan, self._settings
        if plan is None or settings is None or self._placed is None:
            raise ValueError("plan must be called before run")
        expect_shape("q", q, ("tokens", settings.num_qo_heads, settings.head_dims[0]))
        expect_device("q", q, self.device)
        if q.dtype != settings.dtype:
            raise ValueError(f"q must have the planned dtype {settings.dtype}, got {q.dtype}")
        most = self._tokens if self._graph is None else self._graph.tokens
        if not self._tokens <= q.shape[0] <= most:
            raise ValueError(f"q must have {self._tokens} to {most} tokens, got {q.shape[0]}")
        if window_left not in (None, settings.window_left):
            raise ValueError(
                f"window_left must be {settings.window_left} as planned, got {window_left}"
            )
        if lse_base not in ("log2", "ln") or lse_layout not in ("NH", "HN"):
            raise ValueError(
                'lse_base must be "log2" or "ln" and lse_layout "NH" or "HN", got '
                f"{lse_base!r} and {lse_layout!r}"
            )
        if (kv_cache_sf, skip_softmax_threshold_scale_factor) != (None, None):
            raise ValueError("kv_cache_sf and skip_softmax_threshold_scale_factor must be None")
        if lse is not None:
            tokens_heads = (q.shape[0], q.shape[1])
            expect_shape("lse", lse, tokens_heads if lse_layout == "NH" else tokens_heads[::-1])
            expect_device("lse", lse, self.device)
        scale = settings.scale
        for name, factor in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
            if not isinstance(factor, float | int | None):
                raise ValueError(
                    f"{name} must be a float or None here, got {type(factor).__name__}"
                )
            scale *= 1.0 if factor is None or name == "v_scale" else factor
        variant = self._variant(settings, sinks)
        if isinstance(paged_kv_cache, Tensor):
            k, v = paged_kv_cache.unbind(1)
        else:
            k, v = paged_kv_cache
        if self._kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        if settings.encoding.mode == "ROPE_LLAMA":
            assert self._table is not None
            q = encoding.rotated(q, self._table[1], self._placed[1, : q.shape[0]])
        natural, target = None, None if out is None else out.transpose(0, 1)[None]
        if self._graph is not None:  # later plans may have fewer tokens than the captured call
            natural = q.new_full((1, *q.shape[1::-1]), -torch.inf, dtype=torch.float32)
            if target is None:
                target = q.new_zeros(*q.shape[:2], v.shape[3]).transpose(0, 1)[None]
        got, natural = block_sparse_attention(
            q.transpose(0, 1)[None],
            k,
            v,
            plan,
            scale=scale,
            variant=variant,
            out=target,
            lse=natural,
        )
        if v_scale not in (None, 1.0):
            got.mul_(v_scale)
        result = got[0].transpose(0, 1) if out is None else out
        if not return_lse and lse is None:
            return result
        found = natural[0]
        if settings.encoding.mode == "ALIBI":
            assert variant.aux is not None
            found = found + variant.aux[:, None] * self._placed[0, : q.shape[0]]
        if lse_base == "log2":
            found = found * variants.LOG2_E
        found = found.t() if lse_layout == "NH" else found
        found = found if lse is None else lse.copy_(found)
        return (result, found) if return_lse else result

    def _encode(self, wanted: Encoding, length: int) -> None:
        """Have what the encoding reads: slopes, or the table of RoPE for ``length`` positions. What
        is there and reaches as far stays where it is."""
        assert self._settings is not None
        heads = self._settings.num_qo_heads
        if wanted.mode == "ALIBI" and (self._slopes is None or len(self._slopes) != heads):
            self._slopes = encoding.alibi_slopes(heads, self.device)
        if wanted.mode != "ROPE_LLAMA":
            return
        head_dim = self._settings.head_dims[0]
        if self._table is not None:
            made, table = self._table
            if made == wanted and table.shape[0] >= length and 2 * table.shape[2] == head_dim:
                return
        self._table = wanted, encoding.rope_table(wanted, length, head_dim, self.device)

    def _variant(self, settings: Settings, sinks: Tensor | None) -> Variant:
        """What is done with keys, logits and output.

        Raises:
            ValueError: there are sinks where they are not served, or not one for each head.
        """
        found = variants.soft_cap(settings.soft_cap) if settings.soft_cap else SOFTMAX
        if sinks is not None:
            if settings.encoding.mode != "NONE":
                raise ValueError(f"sinks must be None with {settings.encoding.mode}")
            expect_shape("sinks", sinks, (settings.num_qo_heads,))
            return variants.sink(sinks, found)
        if settings.encoding.mode == "ALIBI":
            assert self._slopes is not None
            return variants.alibi(self._slopes)
        if settings.encoding.mode == "ROPE_LLAMA":
            assert self._table is not None
            return variants.rotated_keys(self._table[1], found)
        return found

    def run_return_lse(
        self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], **options: Any
    ) -> tuple[Tensor, Tensor]:
        """``run`` with ``return_lse``."""
        out, lse = self.run(q, paged_kv_cache, return_lse=True, **options)
        return out, lse

    def forward_return_lse(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """FlashInfer's older ``run``, whose soft cap, scale and RoPE's numbers replace the planned.

        Raises:
            ValueError: ``causal``, ``window_left`` or ``pos_encoding_mode`` is not as planned.
        """
        if self._settings is None:
            raise ValueError("plan must be called before run")
        planned, rope = (causal, window_left, pos_encoding_mode), (rope_scale, rope_theta)
        self._settings = self._settings.replaced(planned, logits_soft_cap, sm_scale, rope)
        if self._table is not None:
            self._encode(self._settings.encoding, self._table[1].shape[0])
        return self.run_return_lse(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    @functools.wraps(forward_return_lse)
    def forward(self, *args: Any, **named: Any) -> Tensor:
        return self.forward_return_lse(*args, **named)[0]
