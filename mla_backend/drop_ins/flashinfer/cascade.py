"""FlashInfer's MultiLevelCascadeAttentionWrapper: several levels of keys that meet in combine."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from backend_core.contracts import (
    expect_device,
    expect_dtype,
    expect_kernel_device,
    expect_near,
    expect_shape,
    expect_stride,
    expect_tensors,
    whole_number,
)
from backend_core.launch.streams import is_elsewhere, run_there
from mla_backend.drop_ins.flashinfer.cascade_plan import Level, LevelBuffers, check_given, planned
from mla_backend.drop_ins.flashinfer.merge import merge_states

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_ROWS = 64
KvCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Settings:
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    window_left: int
    cap: float
    dtype: torch.dtype
    causal: bool


class MultiLevelCascadeAttentionWrapper:
    """Attention to keys at several levels, for instance a shared prefix and the requests' own.

    As the wrapper of FlashInfer 0.7.2 and 0.7.4: ``plan`` once per step, ``run`` in every layer.
    Only the last level is causal. LSEs between the levels are base 2.

    With ``use_cuda_graph`` every plan is written into the memory of the first, and what ``run``
    launches reads nothing else: a captured ``run`` serves the plan that was made last. Plan outside
    of the graph, since it reads query offsets on the host, and once before the capture, with
    as many query tokens as any later plan has. Later plans have as many groups per level,
    and the same heads, sizes, scale, window and causality.

    Args:
        num_levels: from 1.
        float_workspace_buffer: tells the device; not used otherwise.
        kv_layout: ``"NHD"`` or ``"HND"``.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr: with ``use_cuda_graph``, int32 ``[groups + 1]``
            per level; paged_kv_last_page_len_buf_arr: ``[groups]``; paged_kv_indices_buf_arr: as
            long as the most pages of the level. Without it they must be ``None``.

    Raises:
        ValueError: an argument is not as described.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[torch.Tensor] | None = None,
    ) -> None:
        num_levels = whole_number("num_levels", num_levels, 1)
        expect_tensors(float_workspace_buffer=float_workspace_buffer)
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f"kv_layout must be NHD or HND, got {kv_layout!r}")
        buffers = (
            qo_indptr_buf_arr,
            paged_kv_indptr_buf_arr,
            paged_kv_indices_buf_arr,
            paged_kv_last_page_len_buf_arr,
        )
        given = [buffer for buffer in buffers if buffer is not None]
        if use_cuda_graph and (len(given) < 4 or any(len(b) != num_levels for b in given)):
            counts = [None if buffer is None else len(buffer) for buffer in buffers]
            raise ValueError(
                f"use_cuda_graph needs {num_levels} of each of the four buffers (qo_indptr,"
                f" paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len), got {counts}"
            )
        if given and not use_cuda_graph:
            raise ValueError("the buffers must be None without use_cuda_graph")
        self.device = float_workspace_buffer.device
        self._num_levels = num_levels
        self._layout = kv_layout
        self._levels: list[Level] = []
        self._rows = 0
        self._settings: _Settings | None = None
        self._buffers = [
            LevelBuffers(number, parts, self.device)
            for number, parts in enumerate(zip(*given, strict=True))
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return bool(self._buffers)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: list[torch.Tensor]
    ) -> None:
        """Take FlashInfer's workspaces, one of integers per level, which are neither kept nor used:
        the plan stays.

        Raises:
            ValueError: a buffer is no tensor or on another device than the wrapper, or the levels
                have not one each.
        """
        if len(int_workspace_buffers) != self._num_levels:
            raise ValueError(
                f"int_workspace_buffers must be {self._num_levels}, one for each level, got"
                f" {len(int_workspace_buffers)}"
            )
        expect_tensors(float_workspace_buffer=float_workspace_buffer)
        expect_device("float_workspace_buffer", float_workspace_buffer, self.device)
        for buffer in int_workspace_buffers:
            expect_tensors(int_workspace_buffer=buffer)
            expect_device("int_workspace_buffer", buffer, self.device)

    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Plan a step; the arrays have one entry per level.

        Args:
            qo_indptr_arr: ``[groups + 1]`` query offsets; a group's queries meet the same pages.
                Their values are checked, and those of the other arrays in host memory.
            paged_kv_indptr_arr: ``[groups + 1]`` offsets into ``paged_kv_indices_arr``.
            paged_kv_last_page_len: ``[groups]`` tokens in the last page of each. All arrays are
                int32 or int64.
            window_left: a query sees so many tokens before its own; -1 is no limit.
            pos_encoding_mode: must be ``"NONE"``; use_fp16_qk_reduction: must be false; rope_scale
                and rope_theta: must be ``None``.
            kv_data_type: ``q_data_type``.

        Raises:
            ValueError: an argument is not as described, or does not fit the memory that CUDA graphs
                keep; nothing has been written then.
        """
        if pos_encoding_mode != "NONE" or rope_scale is not None or rope_theta is not None:
            raise ValueError(
                f"pos_encoding_mode must be NONE without rope_scale and rope_theta, got"
                f" {pos_encoding_mode!r}"
            )
        if use_fp16_qk_reduction:
            raise ValueError("use_fp16_qk_reduction must be false")
        dtype = _DTYPES.get(q_data_type) if isinstance(q_data_type, str) else q_data_type
        if dtype not in _DTYPES.values():
            raise ValueError(f"q_data_type must be one of {list(_DTYPES)}, got {q_data_type!r}")
        kv_dtype = _DTYPES.get(kv_data_type) if isinstance(kv_data_type, str) else kv_data_type
        if kv_data_type is not None and kv_dtype != dtype:
            raise ValueError(f"kv_data_type must be {q_data_type}, got {kv_data_type}")
        num_qo_heads = whole_number("num_qo_heads", num_qo_heads)
        num_kv_heads = whole_number("num_kv_heads", num_kv_heads)
        head_dim, page_size = (
            whole_number("head_dim", head_dim),
            whole_number("page_size", page_size),
        )
        window_left = whole_number("window_left", window_left)
        if min(num_qo_heads, num_kv_heads, page_size) < 1:
            raise ValueError(
                "num_qo_heads, num_kv_heads and page_size must be at least 1, got"
                f" {num_qo_heads}, {num_kv_heads} and {page_size}"
            )
        if num_qo_heads % num_kv_heads:
            raise ValueError(
                f"num_qo_heads must be a multiple of {num_kv_heads}, got {num_qo_heads}"
            )
        if not 16 <= head_dim <= 256:
            raise ValueError(f"head_dim must be 16 to 256, got {head_dim}")
        settings = _Settings(
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            head_dim**-0.5 if sm_scale is None else _number("sm_scale", sm_scale),
            window_left,
            0.0 if logits_soft_cap is None else _number("logits_soft_cap", logits_soft_cap),
            dtype or torch.float16,
            causal,
        )
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        levels = check_given(arrays, self._num_levels, page_size)
        if self._buffers:
            if self._settings not in (None, settings):
                raise ValueError(
                    f"with use_cuda_graph every plan must have the settings of the first,"
                    f" {self._settings}, got {settings}"
                )
            for buffers, given in zip(self._buffers, levels, strict=True):
                buffers.check(given)
        tokens = max(_ROWS // _block_group(num_qo_heads // num_kv_heads), 1)
        last = self._num_levels - 1
        self._levels = []  # what fails on the way leaves no plan
        self._levels = [
            self._buffers[i].write(given, tokens, causal and i == last)
            if self._buffers
            else planned(given, self.device, tokens, causal and i == last)
            for i, given in enumerate(levels)
        ]
        self._settings, self._rows = settings, levels[0].rows

    begin_forward = plan

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Take FlashInfer's call between ``plan`` and a capture. It loads nothing: there is one
        kernel for keys and values of any strides, which a ``run`` before the capture compiles.

        Raises:
            ValueError: nothing is planned, or ``variant`` is not ``"independent"``.
        """
        if not self._levels:
            raise ValueError("plan must be called before prewarm_paged_kv_stride_variant")
        if variant != "independent":
            raise ValueError(f'variant must be "independent", got {variant!r}')

    def run(self, q: torch.Tensor, paged_kv_cache: KvCache) -> torch.Tensor:
        """Attention of the planned step.

        Args:
            q: ``[tokens, num_qo_heads, head_dim]``, at least as many tokens as planned.
            paged_kv_cache: (keys, values), each ``[pages, page size, num_kv_heads, head_dim]`` with
                NHD and ``[pages, num_kv_heads, page size, head_dim]`` with HND; or one tensor
                ``[pages, 2, ...]``.

        Returns:
            ``[tokens, num_qo_heads, head_dim]`` in q's dtype; 0 for tokens beyond the planned ones.

        Raises:
            ValueError: an argument is not as described; nothing has been written then.
        """
        if is_elsewhere(q):
            return run_there(q, MultiLevelCascadeAttentionWrapper.run, locals())
        settings = self._settings
        if settings is None or not self._levels:
            raise ValueError("plan must be called before run")
        expect_tensors(q=q)
        expect_shape("q", q, ("tokens", settings.num_qo_heads, settings.head_dim))
        expect_dtype("q", q, settings.dtype)
        expect_device("q", q, self.device)
        expect_stride("q", q, 2, 1)
        expect_kernel_device("q", q)
        if q.shape[0] < self._rows:
            raise ValueError(f"q must have at least {self._rows} tokens, got {q.shape[0]}")
        k, v = self._keys_and_values(paged_kv_cache)
        for name, tensor, dims in (("q", q, (1,)), ("keys", k, (1, 2)), ("values", v, (1, 2))):
            for dim in dims:
                expect_near(name, tensor, dim)
        states = [self._run_level(level, q, k, v) for level in self._levels]
        if len(states) == 1:
            return states[0][0]
        values = torch.stack([out for out, _ in states], 1)
        return merge_states(values, torch.stack([lse for _, lse in states], 1))

    forward = run

    def _keys_and_values(self, cache: KvCache) -> tuple[torch.Tensor, torch.Tensor]:
        settings = self._settings
        assert settings is not None
        if isinstance(cache, torch.Tensor):
            expect_shape("paged_kv_cache", cache, ("pages", 2, None, None, settings.head_dim))
            k, v = cache[:, 0], cache[:, 1]
        elif isinstance(cache, list | tuple) and len(cache) == 2:
            k, v = cache
        else:
            raise ValueError(
                f"paged_kv_cache must be a tensor or a pair of tensors, got {type(cache).__name__}"
            )
        expect_tensors(keys=k, values=v)
        if self._layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        shape = ("pages", settings.page_size, settings.num_kv_heads, settings.head_dim)
        for name, part in (("keys", k), ("values", v)):
            expect_shape(name, part, shape)
            expect_dtype(name, part, settings.dtype)
            expect_device(name, part, self.device)
            expect_stride(name, part, 3, 1)
        return k, v

    def _run_level(
        self, level: Level, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs, base-2 LSEs) of one level; -inf for a query that it has no keys for."""
        settings = self._settings
        assert settings is not None
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
        _kernel(settings, level.causal, operand_dtype(q)).launch(
            (level.tile_request.shape[0], settings.num_kv_heads, 1),
            q_ptr=q,
            k_ptr=k,
            v_ptr=v,
            out_ptr=out,
            lse_ptr=lse,
            tile_request_ptr=level.tile_request,
            tile_start_ptr=level.tile_start,
            qo_indptr_ptr=level.qo_indptr,
            kv_indptr_ptr=level.kv_indptr,
            kv_indices_ptr=level.kv_indices,
            last_page_len_ptr=level.last_page_len,
            scale=settings.scale,
            cap=settings.cap,
            window=settings.window_left,
            heads=settings.num_qo_heads,
        )
        return out, lse


def _number(name: str, given: object) -> float:
    """A finite number, of which a tensor may have one.

    Raises:
        ValueError: it is none.
    """
    try:
        found = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{name} must be a finite number, got {given!r}")
    return found


def _block_group(group: int) -> int:
    return 1 << (group - 1).bit_length()


@functools.cache
def _kernel(settings: _Settings, causal: bool, operand: torch.dtype) -> KernelLaunch:
    import triton.language as tl

    from backend_core.launch.triton import KernelLaunch
    from mla_backend.kernels.paged_attention import paged_attention_kernel

    group = settings.num_qo_heads // settings.num_kv_heads
    types = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    block_group = _block_group(group)
    constexprs = {
        "GROUP": group,
        "DIM": settings.head_dim,
        "PAGE_SIZE": settings.page_size,
        "BLOCK_TOKENS": max(_ROWS // block_group, 1),
        "BLOCK_GROUP": block_group,
        "BLOCK_KV": 64 if settings.head_dim <= 128 else 32,
        "BLOCK_DIM": 1 << (settings.head_dim - 1).bit_length(),
        "CAUSAL": causal,
        "HAS_WINDOW": settings.window_left >= 0,
        "HAS_CAP": settings.cap > 0,
        "OPERAND": types[operand],
    }
    options = {"num_warps": 4, "num_stages": 2}
    axes = {"q": "th.", "k": "pth.", "v": "pth."}
    return KernelLaunch(paged_attention_kernel, constexprs, options, axes=axes)


def operand_dtype(x: torch.Tensor) -> torch.dtype:
    """The products' dtype: x's, or float32 in Triton's interpreter, which multiplies bf16 by its
    bits."""
    return x.dtype if x.is_cuda else torch.float32
