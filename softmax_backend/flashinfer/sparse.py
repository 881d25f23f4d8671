"""FlashInfer 0.7.2's block-sparse wrappers: the same ``plan`` and ``run``.

Outputs are as FlashInfer's: [M, H, D], LSE [M, H] in base 2. What these wrappers do not serve they
refuse when planning, in one sentence; arguments that only steer FlashInfer's own kernels
(workspaces, ``backend``, ``non_blocking``, ``use_fp16_qk_reduction``, ``enable_pdl``,
``kv_splits``, ``use_clc``) are taken and change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend_core.contracts import expect_device
from softmax_backend.block_sparse import block_sparse_attention, default_blocks
from softmax_backend.flashinfer.packed_mask import bsr_mask
from softmax_backend.flashinfer.workspace import check_workspaces
from softmax_backend.plan import bsr
from softmax_backend.plan.block_plan import BlockPlan
from softmax_backend.spec_block_sparse import LOG2_E

DataType = str | torch.dtype


class _Wrapper:
    """What both wrappers share: the plan, the scale and the cap of the last ``plan``."""

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        """Args:
        float_workspace_buffer: only its device is used.
        backend: taken for FlashInfer's sake.
        """
        self.device = float_workspace_buffer.device
        self._plan: BlockPlan | None = None
        self._dtype = torch.float16
        # what Sparse-VideoGen reads, to give it back to reset_workspace_buffer
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._float_workspace_buffer = self._int_workspace_buffer = empty
        self._vector_sparse_indptr_buffer = empty

    def reset_workspace_buffer(
        self,
        float_workspace_buffer: Tensor,
        int_workspace_buffer: Tensor | None = None,
        vector_sparse_indices_buffer: Tensor | None = None,
        vector_sparse_indptr_buffer: Tensor | None = None,
    ) -> None:
        """Take the workspaces of FlashInfer and of its earlier releases, which are neither kept nor
        used: the plan stays.

        Raises:
            ValueError: the first or the second is on another device than the wrapper.
        """
        check_workspaces(self.device, float_workspace_buffer, int_workspace_buffer)

    def _remember(
        self,
        plan: BlockPlan,
        head_dim: int,
        soft_cap: float | None,
        sm_scale: float | None,
        data_types: tuple[DataType, DataType | None, DataType | None],
        causal: bool,
        pos_encoding_mode: str,
        **absent: object,
    ) -> None:
        """Keep what ``run`` reads.

        Args:
            data_types: of queries, keys and output; all are the queries'.
            absent: must be ``None``.
        """
        dtype = as_dtype(data_types[0])
        refused = {
            "causal": (causal, False),
            "pos_encoding_mode": (pos_encoding_mode, "NONE"),
            "kv_data_type": (as_dtype(data_types[1] or dtype), dtype),
            "o_data_type": (as_dtype(data_types[2] or dtype), dtype),
            **{name: (given, None) for name, given in absent.items()},
        }
        for name, (got, served) in refused.items():
            if got != served:
                raise ValueError(f"{name} must be {served!r} here, got {got!r}")
        self._plan = plan
        self._sm_scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self._logits_soft_cap = soft_cap or 0.0
        self._causal, self._window_left = False, -1
        self._dtype = dtype

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """[1, H, L, D] views in; ``out`` and ``lse`` are written through views."""
        if self._plan is None:
            raise ValueError("plan must be called before run")
        if q.dtype != self._dtype:
            raise ValueError(f"q must have the planned dtype {self._dtype}, got {q.dtype}")
        if lse is not None:
            expect_device("lse", lse, q.device)
        got, natural = block_sparse_attention(
            q,
            k,
            v,
            self._plan,
            scale=self._sm_scale,
            soft_cap=self._logits_soft_cap or None,
            out=out,
        )
        base_2 = natural.mul_(LOG2_E)
        if lse is not None:
            base_2 = lse.copy_(base_2)
        return got, base_2


class BlockSparseAttentionWrapper(_Wrapper):
    """Attention under a block-sparse matrix in BSR form, any block size; one pattern for all heads,
    or with ``block_mask`` one for each, on every GPU."""

    def plan(
        self,
        indptr: Tensor | None,
        indices: Tensor | None,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Tensor | None = None,
        packed_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DataType = "float16",
        kv_data_type: DataType | None = None,
        o_data_type: DataType | None = None,
        non_blocking: bool = True,
        block_mask: Tensor | None = None,
        kv_block_lens: None = None,
        q2k_indices: None = None,
        q2k_num: None = None,
        kv_splits: int | str | None = None,
        use_clc: bool | None = None,
        q_scale: None = None,
        k_scale: None = None,
        v_scale: None = None,
    ) -> None:
        """As FlashInfer's. ``indptr`` [MB + 1] and ``indices`` [nnz], or ``block_mask``
        [H or Hkv, MB, NB]; ``mask`` [nnz, R, C], or ``packed_mask``, which goes before it: bits,
        lowest first, of [queries, blocks, C] of each block row, from a byte of its own. The output
        is in q's dtype, by default too, where FlashInfer's is float16.

        Raises:
            ValueError: an argument is malformed or not served (``causal``: its meaning over
                gathered blocks is FlashInfer's own, give ``mask``).
        """
        block_m, block_n = default_blocks(self.device, head_dim)
        if block_mask is not None:
            if mask is not None or packed_mask is not None:
                raise ValueError("mask and packed_mask must be None with block_mask")
            heads = block_mask.shape[0]
            if heads not in (num_qo_heads, num_kv_heads):
                raise ValueError(
                    f"block_mask must have {num_qo_heads} or {num_kv_heads} heads, got {heads}"
                )
            mb, nb = -(-M // R), -(-N // C)
            rows = torch.full((1, mb), R, device=self.device)
            rows[0, -1] = M - (mb - 1) * R
            cols = torch.full((1, nb), C, device=self.device)
            cols[0, -1] = N - (nb - 1) * C
            wanted = block_mask.to(self.device).bool()
            plan = bsr.from_block_map(
                wanted, rows, cols, num_qo_heads, block_m=block_m, block_n=block_n
            )
        elif indptr is None or indices is None:
            raise ValueError("indptr and indices must be given where block_mask is not")
        else:
            if packed_mask is not None and indices.numel():
                mask = bsr_mask(packed_mask, indptr, M, R, C)
            plan = bsr.from_bsr(
                indptr.to(self.device),
                indices.to(self.device),
                M,
                N,
                R,
                C,
                num_qo_heads,
                mask=mask,
                block_m=block_m,
                block_n=block_n,
            )
        self._remember(
            plan,
            head_dim,
            logits_soft_cap,
            sm_scale,
            (q_data_type, kv_data_type, o_data_type),
            causal,
            pos_encoding_mode,
            kv_block_lens=kv_block_lens,
            q2k_indices=q2k_indices,
            q2k_num=q2k_num,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of q [M, H, D] to k and v [N, Hkv, D] (or [N / C, C, Hkv, D]).

        Returns:
            Output [M, H, D]; with ``return_lse`` also LSE [M, H], float32, base 2.
        """
        if (scale_q, scale_k, scale_v) != (None, None, None):
            raise ValueError("scale_q, scale_k and scale_v must be None: inputs are 16-bit here")
        k, v = (x.reshape(-1, *x.shape[-2:]) for x in (k, v))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        target = None if out is None else out.transpose(0, 1)[None]
        lse_target = None if lse is None else lse.t()[None]
        got, base_2 = self._attend(q, k, v, target, lse_target)
        result = got[0].transpose(0, 1)
        return (result, base_2[0].t()) if return_lse else result


class VariableBlockSparseAttentionWrapper(_Wrapper):
    """Attention under a block map with blocks of varying size, one pattern for each KV head.

    The maps stay maps: nothing is expanded to pages of one token.
    """

    def plan(
        self,
        block_mask_map: Tensor,
        block_row_sz: Tensor,
        block_col_sz: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: DataType = "float16",
        kv_data_type: DataType | None = None,
    ) -> None:
        """As FlashInfer's: ``block_mask_map`` bool [Hkv, MB, NB], ``block_row_sz`` [Hkv, MB] and
        ``block_col_sz`` [Hkv, NB].

        Raises:
            ValueError: an argument is malformed or not served.
        """
        if block_mask_map.shape[0] != num_kv_heads:
            raise ValueError(
                f"block_mask_map must have {num_kv_heads} heads, got {block_mask_map.shape[0]}"
            )
        block_m, block_n = default_blocks(self.device, head_dim)
        plan = bsr.from_block_map(
            block_mask_map.to(self.device).bool(),
            block_row_sz.to(self.device),
            block_col_sz.to(self.device),
            num_qo_heads,
            block_m=block_m,
            block_n=block_n,
        )
        self._remember(
            plan,
            head_dim,
            logits_soft_cap,
            sm_scale,
            (q_data_type, kv_data_type, None),
            causal,
            pos_encoding_mode,
        )

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of q [H, M, D] to k and v [Hkv, N, D].

        Returns:
            Output [H, M, D]; with ``return_lse`` also LSE [H, M], float32, base 2.
        """
        target = None if out is None else out[None]
        lse_target = None if lse is None else lse[None]
        got, base_2 = self._attend(q[None], k[None], v[None], target, lse_target)
        return (got[0], base_2[0]) if return_lse else got[0]


def as_dtype(name: DataType) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else name
    if found not in (torch.float16, torch.bfloat16):
        raise ValueError(f"data type must be float16 or bfloat16, got {name}")
    return found
