"""FlashInfer 0.7.2's ``BatchPrefillWithPagedKVCacheWrapper``: the same ``plan`` and ``run``.

16-bit caches. LSE [T, H] in base 2 (``lse_base="log2"``, as FlashInfer's). What is not served is
refused in one sentence; arguments that steer FlashInfer's own kernels change nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softmax_backend.block_sparse import block_sparse_attention, default_blocks
from softmax_backend.flashinfer.sparse import DataType, as_dtype
from softmax_backend.plan import intervals
from softmax_backend.plan.block_plan import BlockPlan
from softmax_backend.variants import variant as variants
from softmax_backend.variants.variant import Variant


class BatchPrefillWithPagedKVCacheWrapper:
    """Causal or full attention of ragged queries over paged keys."""

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
    ) -> None:
        """Args:
        float_workspace_buffer: only its device is used.
        kv_layout: of the cache: "NHD", [pages, page size, Hkv, D], or "HND", [pages, Hkv, page
            size, D].
        use_cuda_graph: must be ``False``: ``plan`` reads lengths on the host.
        jit_args: must be ``None``: variants are functions here, see ``softmax_backend.variants``.

        The other arguments are taken for FlashInfer's sake.

        Raises:
            ValueError: an argument is not served.
        """
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f'kv_layout must be "NHD" or "HND", got {kv_layout!r}')
        if use_cuda_graph:
            raise ValueError("use_cuda_graph must be False here, got True")
        if jit_args is not None:
            raise ValueError("jit_args must be None here: give a variant to softmax_backend")
        self.device = float_workspace_buffer.device
        self._kv_layout = kv_layout
        self._plan: BlockPlan | None = None
        self._scale: float | None = None
        self._variant: Variant = variants.SOFTMAX
        self._dtype = torch.float16
        self._causal, self._window_left = False, -1

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        """There is no workspace."""

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
    ) -> None:
        """As FlashInfer's: ``qo_indptr`` [S + 1], the cache's CSR ``paged_kv_indptr`` [S + 1],
        ``paged_kv_indices`` and ``paged_kv_last_page_len`` [S]. Reads the lengths on the host.

        Raises:
            ValueError: an argument is malformed or not served.
        """
        if custom_mask is not None or packed_custom_mask is not None:
            raise ValueError("custom masks must be None here: give their blocks to plan.bsr")
        if pos_encoding_mode != "NONE":
            raise ValueError(f"pos_encoding_mode must be 'NONE' here, got {pos_encoding_mode!r}")
        if (prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr) != (None, None, None):
            raise ValueError("prefix_len_ptr and the positions in items must be None here")
        if window_left >= 0 and not causal:
            raise ValueError("window_left needs causal=True here")
        self._dtype = as_dtype(q_data_type)
        for name, given in (("kv_data_type", kv_data_type), ("o_data_type", o_data_type)):
            if given is not None and as_dtype(given) != self._dtype:
                raise ValueError(f"{name} must be {self._dtype} as q_data_type is, got {given}")
        offsets = qo_indptr.to(self.device, torch.int32)
        pages = paged_kv_indptr.to(self.device, torch.int32)
        last = paged_kv_last_page_len.to(self.device, torch.int32)
        kv_lens = torch.where(pages.diff() > 0, (pages.diff() - 1) * page_size + last, 0)
        block_m, block_n = default_blocks(self.device, head_dim_qk)
        self._plan = intervals.paged(
            offsets,
            kv_lens.int(),
            pages,
            paged_kv_indices.to(self.device),
            page_size,
            int(offsets.diff().max()),
            int(kv_lens.max()),
            num_qo_heads,
            is_causal=causal,
            window=window_left + 1 if window_left >= 0 else None,
            block_m=block_m,
            block_n=min(block_n, 64),
        )
        self._causal, self._window_left = causal, window_left
        self._scale = sm_scale
        self._variant = variants.soft_cap(logits_soft_cap) if logits_soft_cap else variants.SOFTMAX

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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of q [T, H, D] to the cache, a pair of tensors or one [pages, 2, ...].

        Args:
            q_scale, k_scale: multiply the logits, ``v_scale`` the output.
            window_left: as planned, or ``None``.
            sinks: float32 [H], one more logit for each head, with value 0.

        Returns:
            Output [T, H, DV]; with ``return_lse`` also LSE [T, H], float32, base 2, without sinks.
        """
        if self._plan is None:
            raise ValueError("plan must be called before run")
        if q.dtype != self._dtype:
            raise ValueError(f"q must have the planned dtype {self._dtype}, got {q.dtype}")
        if window_left not in (None, self._window_left):
            raise ValueError(
                f"window_left must be {self._window_left} as planned, got {window_left}"
            )
        for name, given in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
            if not isinstance(given, float | int | None):
                raise ValueError(f"{name} must be a float or None here, got {type(given).__name__}")
        scale = q.shape[2] ** -0.5 if self._scale is None else self._scale
        for factor in (q_scale, k_scale):
            scale *= 1.0 if factor is None else factor
        if sinks is not None and self._variant is not variants.SOFTMAX:
            raise ValueError("sinks must be None with logits_soft_cap")
        if isinstance(paged_kv_cache, Tensor):
            k, v = paged_kv_cache.unbind(1)
        else:
            k, v = paged_kv_cache
        if self._kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        got, natural = block_sparse_attention(
            q.transpose(0, 1)[None],
            k,
            v,
            self._plan,
            scale=scale,
            variant=self._variant if sinks is None else variants.sink(sinks),
            out=None if out is None else out.transpose(0, 1)[None],
        )
        if v_scale not in (None, 1.0):
            got.mul_(v_scale)
        result = got[0].transpose(0, 1) if out is None else out
        if not return_lse:
            return result
        base_2 = natural[0].t() * variants.LOG2_E
        return result, base_2 if lse is None else lse.copy_(base_2)

    def run_return_lse(
        self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor], **options: Any
    ) -> tuple[Tensor, Tensor]:
        """``run`` with ``return_lse``."""
        out, lse = self.run(q, paged_kv_cache, return_lse=True, **options)
        return out, lse

    def forward(
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
    ) -> Tensor | tuple[Tensor, Tensor]:
        """FlashInfer's older ``run``, whose soft cap and scale replace the planned ones.

        Raises:
            ValueError: ``causal`` or ``window_left`` is not as planned, or there is an encoding.
        """
        planned = {"causal": self._causal, "window_left": self._window_left}
        for name, got in (("causal", causal), ("window_left", window_left)):
            if got != planned[name]:
                raise ValueError(f"{name} must be {planned[name]} as planned, got {got}")
        if pos_encoding_mode != "NONE":
            raise ValueError(f"pos_encoding_mode must be 'NONE' here, got {pos_encoding_mode!r}")
        self._scale = sm_scale
        self._variant = variants.soft_cap(logits_soft_cap) if logits_soft_cap else variants.SOFTMAX
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)
