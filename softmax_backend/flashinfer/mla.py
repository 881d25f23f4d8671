"""FlashInfer's BatchMLAPagedAttentionWrapper."""

from __future__ import annotations

import math

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape
from softmax_backend.api import mla_decode
from softmax_backend.contract.mla_decode import by_request
from softmax_backend.flashinfer.workspace import check_workspaces
from softmax_backend.plan.planner import MlaPlanner
from softmax_backend.scratch import Scratch
from softmax_backend.selection import select_for
from softmax_backend.spec import LATENT_DIM, MAX_QUERY_TOKENS, ROPE_DIM, MlaSpec
from softmax_backend.step_plan import StepPlan

_LOG2E = 1 / math.log(2)
_BACKENDS = ("auto", "fa2", "fa3", "cutlass", "cutile", "trtllm-gen", "xqa", "cute-dsl",
             "cute-dsl-monolithic", "cute-dsl-modular")  # fmt: skip


class BatchMLAPagedAttentionWrapper:
    """MLA over a paged cache: ``plan`` once per step, ``run`` in every layer.

    As FlashInfer 0.7.2's wrapper in its form with ``qo_indptr`` and ``kv_indptr``, split queries
    and split caches; LSEs are base 2, and -inf where a query sees no key. What differs: requests of
    a batch with 1 to 8 query tokens each, all alike, read their keys once; otherwise once per query
    token. The workspace is not used.

    Args:
        float_workspace_buffer: tells the device.
        use_cuda_graph: ``plan`` copies into buffers that stay, so that a captured ``run`` may be
            replayed. The batch and all that ``plan`` is given beside pages and lengths must then
            stay as at the first ``plan``.
        qo_indptr, kv_indptr, kv_indices, kv_len_arr: those buffers of FlashInfer; here
            ``kv_indices`` tells how many pages a request may have at most.
        backend: accepted and without effect.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        if backend not in _BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
        if use_cuda_graph and kv_indices is None:
            raise ValueError("kv_indices must be given with use_cuda_graph, got None")
        self.device = float_workspace_buffer.device
        self._graph = use_cuda_graph
        self._most_pages = 0 if kv_indices is None else kv_indices.numel()
        self._scratch = Scratch(self.device)
        self._lengths: torch.Tensor | None = None
        self._table: torch.Tensor | None = None
        self._plan: StepPlan | None = None
        self._settings: tuple[MlaSpec, float, bool] | None = None

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Take the workspaces of FlashInfer's other wrappers, which are neither kept nor used: the
        plan stays.

        Raises:
            ValueError: a buffer is on another device than the wrapper.
        """
        check_workspaces(self.device, float_workspace_buffer, int_workspace_buffer)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
        *,
        query_layout: str = "split",
        kv_cache_layout: str = "split",
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Plan a step.

        Args:
            qo_indptr, kv_indptr: ``[batch + 1]`` offsets of queries and of pages.
            kv_indices: ``[kv_indptr[-1]]`` or more pages; kv_len_arr: ``[batch]`` tokens.
            head_dim_ckv, head_dim_kpe: 512 and 64.
            kv_data_type: ``q_data_type``, or ``torch.float8_e4m3fn``.
            use_profiler, skip_softmax: must be false; query_layout, kv_cache_layout: "split";
                output_dtype: ``q_data_type`` or ``None``; output_scale: "none"; scale_mode:
                "default" or "kv-per-tensor".
            lse_mode, enable_pdl, use_sinks: without effect; ``run`` says what it is asked for.

        Raises:
            ValueError: an argument is not as described.
        """
        if (head_dim_ckv, head_dim_kpe) != (LATENT_DIM, ROPE_DIM):
            raise ValueError(
                f"head_dim_ckv and head_dim_kpe must be 512 and 64, got {head_dim_ckv} and"
                f" {head_dim_kpe}"
            )
        served: tuple[tuple[str, object, tuple[object, ...]], ...] = (
            ("use_profiler", use_profiler, (False,)),
            ("query_layout", query_layout, ("split",)),
            ("kv_cache_layout", kv_cache_layout, ("split",)),
            ("output_dtype", output_dtype, (None, q_data_type)),
            ("output_scale", output_scale, ("none",)),
            ("scale_mode", scale_mode, ("default", "kv-per-tensor")),
            ("skip_softmax", skip_softmax, (False,)),
        )
        for name, given, values in served:
            if given not in values:
                wanted = " or ".join(str(value) for value in values)
                raise ValueError(f"{name} must be {wanted}, got {given}")
        if kv_data_type not in (q_data_type, torch.float8_e4m3fn):
            raise ValueError(
                f"kv_data_type must be {q_data_type} or float8_e4m3fn, got {kv_data_type}"
            )
        batch = kv_len_arr.shape[0]
        if not batch:
            raise ValueError("kv_len_arr must have at least one request, got none")
        expect_shape("qo_indptr", qo_indptr, (batch + 1,))
        expect_shape("kv_indptr", kv_indptr, (batch + 1,))
        counts = qo_indptr.cpu().diff().tolist()
        tokens = counts[0] if len(set(counts)) == 1 and counts[0] <= MAX_QUERY_TOKENS else 1
        if not tokens:
            raise ValueError("qo_indptr must give each request a query token, got none")
        spec = MlaSpec(
            num_heads,
            page_size,
            query_tokens=tokens,
            cache_format="fp8" if kv_data_type == torch.float8_e4m3fn else "16-bit",
            dtype=q_data_type,
        )
        lengths, table = self._requests(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, counts, tokens, causal
        )
        settings = (spec, sm_scale, causal)
        if self._graph and self._plan is not None:
            if settings != self._settings:
                raise ValueError(
                    "with use_cuda_graph every plan must have the settings of the first,"
                    f" {self._settings}, got {settings}"
                )
            self._copy(lengths, table)
        else:
            self._lengths, self._table, self._plan = lengths, table, None
        assert self._lengths is not None
        self._settings = settings
        planner = MlaPlanner(select_for(self.device, spec))
        self._plan = planner.plan(self._lengths, out=self._plan)
        self._selection = planner.selection

    @torch.inference_mode()  # the first plan may have been made in it
    def _copy(self, lengths: torch.Tensor, table: torch.Tensor) -> None:
        assert self._lengths is not None and self._table is not None
        if lengths.shape != self._lengths.shape:
            raise ValueError(
                f"qo_indptr must give {self._lengths.shape[0]} requests as at the first plan, got"
                f" {lengths.shape[0]}"
            )
        self._lengths.copy_(lengths)
        self._table.copy_(table)

    def _requests(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        counts: list[int],
        tokens: int,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(lengths, block table) of the requests, or of their query tokens where these differ."""
        indptr = kv_indptr.to(self.device).long()
        pages = kv_indices.to(self.device, torch.int32)
        widest = int(kv_indptr.cpu().diff().max())
        if self._graph and widest > self._most_pages:
            raise ValueError(
                f"kv_indptr must give a request at most the {self._most_pages} pages of the buffer"
                f" kv_indices, got {widest}"
            )
        width = max(self._most_pages if self._graph else widest, 1)
        at = indptr[:-1, None] + torch.arange(width, device=self.device)
        table = pages[at.clamp(max=pages.numel() - 1)] if pages.numel() else at.int() * 0
        lengths = kv_len_arr.to(self.device, torch.int32)
        if set(counts) == {tokens}:
            return lengths.clone(), table
        each = torch.tensor(counts, device=self.device)
        request = torch.arange(len(counts), device=self.device).repeat_interleave(each)
        lengths = lengths[request]
        if causal:
            after = qo_indptr.to(self.device)[1:][request] - 1
            after = after - torch.arange(len(request), device=self.device)
            lengths = (lengths - after).clamp(min=0).int()
        return lengths, table[request]

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned step.

        Args:
            q_nope: ``[tokens, heads, 512]``; q_pe: ``[tokens, heads, 64]``.
            ckv_cache: ``[pages, page size, 512]``; kpe_cache: ``[pages, page size, 64]``.
            out: ``[tokens, heads, 512]``; lse: ``[tokens, heads]`` float32; where to write.
            return_lse_base_on_e: the LSE is natural instead of base 2.
            ckv_scale, kpe_scale: of an fp8 cache; must be the same.
            sinks: ``[heads]`` float32 natural logits.
            profiler_buffer, kv_len, page_table, o_scale: must be ``None``.

        Returns:
            out, or (out, lse) with ``return_lse``.

        Raises:
            ValueError: an argument is not as described; nothing has been written then.
        """
        if self._plan is None or self._table is None or self._settings is None:
            raise ValueError("plan must be called before run")
        spec, scale, causal = self._settings
        given = {
            "profiler_buffer": profiler_buffer,
            "kv_len": kv_len,
            "page_table": page_table,
            "o_scale": o_scale,
        }
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} must be None")
        fp8 = spec.cache_format == "fp8"
        if (ckv_scale is None) == fp8 or ckv_scale != kpe_scale:
            wanted = "given and the same" if fp8 else "None"
            raise ValueError(
                f"ckv_scale and kpe_scale must be {wanted}, got {ckv_scale} and {kpe_scale}"
            )
        rows = (self._plan.requests, spec.query_tokens, spec.num_heads)
        tokens = rows[0] * rows[1]
        expect_shape("q_nope", q_nope, (tokens, rows[2], LATENT_DIM))
        expect_shape("q_pe", q_pe, (tokens, rows[2], ROPE_DIM))
        if out is not None:
            expect_shape("out", out, (tokens, rows[2], LATENT_DIM))
        if lse is not None:
            expect_shape("lse", lse, (tokens, rows[2]))
            expect_dtype("lse", lse, torch.float32)
            expect_device("lse", lse, self.device)
        result, natural = mla_decode(
            by_request(q_nope, rows[0]),
            by_request(q_pe, rows[0]),
            ckv_cache,
            kpe_cache,
            self._table,
            self._plan,
            self._selection,
            scale=scale,
            causal=causal,
            kv_scale=1.0 if ckv_scale is None else ckv_scale,
            sinks=sinks,
            out=None if out is None else out.view(*rows, LATENT_DIM),
            scratch=self._scratch,
        )
        result = result.flatten(0, 1)
        if not return_lse and lse is None:
            return result
        values = natural.flatten(0, 1)
        values = torch.where(values == math.inf, -math.inf, values)
        values = values if return_lse_base_on_e else values * _LOG2E
        values = values if lse is None else lse.copy_(values)
        return (result, values) if return_lse else result

    forward = run
