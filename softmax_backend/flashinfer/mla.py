"""FlashInfer's BatchMLAPagedAttentionWrapper."""

from __future__ import annotations

import math

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape
from softmax_backend.api import mla_decode, selection_for
from softmax_backend.contract.mla_decode import by_request
from softmax_backend.flashinfer.workspace import check_workspaces
from softmax_backend.plan.planner import MlaPlanner
from softmax_backend.scratch import Scratch
from softmax_backend.spec import LATENT_DIM, MAX_QUERY_TOKENS, ROPE_DIM, MlaSpec
from softmax_backend.step_plan import StepPlan

_LOG2E = 1 / math.log(2)
_BACKENDS = ("auto", "fa2", "fa3", "cutlass", "cutile", "trtllm-gen", "xqa", "cute-dsl",
             "cute-dsl-monolithic", "cute-dsl-modular")  # fmt: skip
_TABLE = 2**22
"""Entries of a graph's block table, if ``kv_indices`` is not longer."""


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
            ``kv_indices`` tells how many pages a request may have at most: an equal share of it,
            or, if that is less, of 2**22, but never more than its length.
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
        self._capacity = 0 if kv_indices is None else kv_indices.numel()
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
        metadata: None = None,
        cum_seq_lens_q: None = None,
        block_tables: None = None,
        seq_lens: None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
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
            qo_indptr: ``[batch + 1]`` offsets of queries; kv_indptr: those of pages, of which more
                may follow.
            kv_indices: ``[kv_indptr[-1]]`` or more pages; kv_len_arr: ``[batch]`` tokens.
            head_dim_ckv, head_dim_kpe: 512 and 64.
            kv_data_type: ``q_data_type``, of 16 or 32 bits.
            metadata, cum_seq_lens_q, block_tables, seq_lens: must be ``None``.
            use_profiler, skip_softmax: must be false; query_layout, kv_cache_layout: "split" or
                ``None``; output_dtype: ``q_data_type`` or ``None``; output_scale: "none";
                scale_mode: "default".
            max_q_len, lse_mode, enable_pdl, use_sinks: without effect; ``run`` says what it is
                asked for.

        Raises:
            ValueError: an argument is not as described.
        """
        if (head_dim_ckv, head_dim_kpe) != (LATENT_DIM, ROPE_DIM):
            raise ValueError(
                f"head_dim_ckv and head_dim_kpe must be 512 and 64, got {head_dim_ckv} and"
                f" {head_dim_kpe}"
            )
        _expect_none(
            metadata=metadata,
            cum_seq_lens_q=cum_seq_lens_q,
            block_tables=block_tables,
            seq_lens=seq_lens,
        )
        if 1 in (q_data_type.itemsize, kv_data_type.itemsize):
            raise ValueError(
                "q_data_type and kv_data_type must be of 16 or 32 bits: caches of 8 bits are not"
                f" served here, got {q_data_type} and {kv_data_type}"
            )
        served: tuple[tuple[str, object, tuple[object, ...]], ...] = (
            ("use_profiler", use_profiler, (False,)),
            ("query_layout", query_layout, ("split", None)),
            ("kv_cache_layout", kv_cache_layout, ("split", None)),
            ("output_dtype", output_dtype, (None, q_data_type)),
            ("output_scale", output_scale, ("none",)),
            ("scale_mode", scale_mode, ("default",)),
            ("kv_data_type", kv_data_type, (q_data_type,)),
            ("skip_softmax", skip_softmax, (False,)),
        )
        for name, given, values in served:
            if given not in values:
                wanted = " or ".join(str(value) for value in values)
                raise ValueError(f"{name} must be {wanted}, got {given}")
        batch = kv_len_arr.shape[0]
        if not batch:
            raise ValueError("kv_len_arr must have at least one request, got none")
        expect_shape("qo_indptr", qo_indptr, (batch + 1,))
        counts = qo_indptr.cpu().diff().tolist()
        tokens = counts[0] if len(set(counts)) == 1 and counts[0] <= MAX_QUERY_TOKENS else 1
        if not tokens:
            raise ValueError("qo_indptr must give each request a query token, got none")
        spec = MlaSpec(num_heads, page_size, query_tokens=tokens, dtype=q_data_type)
        offsets = _offsets(kv_indptr[: batch + 1], batch, kv_indices.numel())
        lengths, begins, pages = self._requests(
            qo_indptr, offsets, kv_len_arr, counts, tokens, causal
        )
        settings = (spec, sm_scale, causal)
        width = self._width(pages)
        if self._graph and self._plan is not None:
            assert self._lengths is not None
            if settings != self._settings:
                raise ValueError(
                    "with use_cuda_graph every plan must have the settings of the first,"
                    f" {self._settings}, got {settings}"
                )
            if lengths.shape != self._lengths.shape:
                raise ValueError(
                    f"qo_indptr must give {self._lengths.shape[0]} requests as at the first plan,"
                    f" got {lengths.shape[0]}"
                )
        else:
            self._lengths, self._plan = lengths, None
            self._table = torch.zeros(len(lengths), width, dtype=torch.int32, device=self.device)
        self._write(lengths, begins, pages, kv_indices)
        assert self._lengths is not None
        self._settings, self._sm_scale, self._causal = settings, sm_scale, causal
        planner = MlaPlanner(selection_for(self.device, spec))
        self._plan = planner.plan(self._lengths, out=self._plan)
        self._selection = planner.selection

    def _width(self, pages: torch.Tensor) -> int:
        """Pages of a row of the table; for a graph as many as any plan may ask for."""
        widest = max(int(pages.max()), 1)
        if not self._graph:
            return widest
        share = max(self._capacity, _TABLE) // len(pages)
        width = max(min(self._capacity, share), 1)
        if widest > width:
            raise ValueError(
                f"kv_indptr must give a request at most {width} pages, for kv_indices with"
                f" {self._capacity} and {len(pages)} requests, got {widest}"
            )
        return width

    @torch.inference_mode()  # the first plan may have been made in it
    def _write(
        self,
        lengths: torch.Tensor,
        begins: torch.Tensor,
        pages: torch.Tensor,
        kv_indices: torch.Tensor,
    ) -> None:
        """Copy the lengths, and to each row of the table its pages and no more."""
        assert self._lengths is not None and self._table is not None
        self._lengths.copy_(lengths)
        total, device = int(pages.sum()), self.device
        begins, pages = begins.to(device), pages.to(device)
        row = torch.arange(len(pages), device=device).repeat_interleave(pages, output_size=total)
        column = torch.arange(total, device=device) - (pages.cumsum(0) - pages)[row]
        place = row * self._table.shape[1] + column
        self._table.view(-1)[place] = kv_indices.to(device, torch.int32)[begins[row] + column]

    def _requests(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len_arr: torch.Tensor,
        counts: list[int],
        tokens: int,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(lengths, first places in kv_indices, numbers of pages) of the requests, or of their
        query tokens where these differ; the last two on the host, int64."""
        begins, pages = kv_indptr[:-1].long(), kv_indptr.long().diff()
        lengths = kv_len_arr.to(self.device, torch.int32)
        if set(counts) == {tokens}:
            return lengths.clone(), begins, pages
        each = torch.tensor(counts, device="cpu")
        request = torch.arange(len(counts), device="cpu").repeat_interleave(each)
        begins, pages, request = begins[request], pages[request], request.to(self.device)
        lengths = lengths[request]
        if causal:
            after = qo_indptr.to(self.device)[1:][request] - 1
            after = after - torch.arange(len(request), device=self.device)
            lengths = (lengths - after).clamp(min=0).int()
        return lengths, begins, pages

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
        query: None = None,
        kv_cache: None = None,
        ckv_scale: None = None,
        ckv_scale_arr: None = None,
        kpe_scale: None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: None = None,
        bmm1_scale: None = None,
        bmm2_scale: None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned step.

        Args:
            q_nope: ``[tokens, heads, 512]``; q_pe: ``[tokens, heads, 64]``.
            ckv_cache: ``[pages, page size, 512]``; kpe_cache: ``[pages, page size, 64]``.
            out: ``[tokens, heads, 512]``; lse: ``[tokens, heads]`` float32; where to write.
            return_lse_base_on_e: the LSE is natural instead of base 2.
            sinks: ``[heads]`` float32 natural logits.
            profiler_buffer, kv_len, page_table, o_scale, query, kv_cache, ckv_scale, ckv_scale_arr,
                kpe_scale, skip_softmax_threshold_scale_factor, bmm1_scale, bmm2_scale: must be
                ``None``.

        Returns:
            out, or (out, lse) with ``return_lse``.

        Raises:
            ValueError: an argument is not as described; nothing has been written then.
        """
        if self._plan is None or self._table is None or self._settings is None:
            raise ValueError("plan must be called before run")
        spec, scale, causal = self._settings
        _expect_none(
            profiler_buffer=profiler_buffer,
            kv_len=kv_len,
            page_table=page_table,
            o_scale=o_scale,
            query=query,
            kv_cache=kv_cache,
            ckv_scale=ckv_scale,
            ckv_scale_arr=ckv_scale_arr,
            kpe_scale=kpe_scale,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale,
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


def _expect_none(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} must be None")


def _offsets(kv_indptr: torch.Tensor, batch: int, pages: int) -> torch.Tensor:
    """The offsets on the host."""
    expect_shape("kv_indptr", kv_indptr, (batch + 1,))
    found = kv_indptr.cpu()
    if found[0] < 0 or (found.diff() < 0).any() or found[-1] > pages:
        raise ValueError(
            f"kv_indptr must not fall and stay within kv_indices, of {pages} pages, got"
            f" {found.tolist()}"
        )
    return found
