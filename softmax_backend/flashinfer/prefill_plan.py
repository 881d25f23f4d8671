"""A step of the paged prefill wrapper: its requests, their plan, and the memory that a CUDA graph
keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride
from softmax_backend.flashinfer.encoding import Encoding, checked
from softmax_backend.flashinfer.packed_mask import unpacked
from softmax_backend.plan import bsr, intervals
from softmax_backend.plan.block_plan import BlockPlan, Pages, padded
from softmax_backend.variants import variant as variants

Buffers = tuple[Tensor, Tensor, Tensor, Tensor]
_NAMES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


@dataclass(frozen=True)
class Settings:
    """What a plan fixes besides its requests.

    Attributes:
        head_dims: of queries and keys, and of values.
        is_masked: the caller gives the mask, and ``causal`` is without meaning.
        window_left: keys before a query's own that it sees; -1 is no limit.
        soft_cap: 0 is none.
        scale: of the logits.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dims: tuple[int, int]
    page_size: int
    causal: bool
    is_masked: bool
    window_left: int
    encoding: Encoding
    soft_cap: float
    scale: float
    dtype: torch.dtype

    def replaced(
        self,
        planned: tuple[bool, int, str],
        soft_cap: float | None,
        scale: float | None,
        rope: tuple[float | None, float | None],
    ) -> Settings:
        """The settings of FlashInfer's older ``forward``.

        Args:
            planned: ``causal``, ``window_left`` and ``pos_encoding_mode``, as planned.
            soft_cap, scale: instead of the planned; rope: ``rope_scale`` and ``rope_theta``.

        Raises:
            ValueError: something is not as planned, or is not served.
        """
        names = ("causal", "window_left", "pos_encoding_mode")
        served = (self.causal, self.window_left, self.encoding.mode)
        for name, got, wanted in zip(names, planned, served, strict=True):
            if got != wanted:
                raise ValueError(f"{name} must be {wanted!r} as planned, got {got!r}")
        head_dim = self.head_dims[0]
        return replace(
            self,
            encoding=checked(planned[2], *rope, head_dim, soft_cap),
            soft_cap=variants.soft_cap(soft_cap).value if soft_cap else 0.0,
            scale=head_dim**-0.5 if scale is None else scale,
        )


@dataclass(frozen=True)
class Requests:
    """The requests of a step, lengths on the host.

    Attributes:
        arrays: as ``plan`` was given them: query offsets [S + 1], offsets into the pages [S + 1],
            pages, and tokens in each request's last page [S].
        q_lens, kv_lens: int64 [S], on the host.
    """

    arrays: Buffers
    q_lens: Tensor
    kv_lens: Tensor

    @property
    def tokens(self) -> int:
        return int(self.arrays[0][-1])

    @property
    def elements(self) -> Tensor:
        """int64 [S]: elements of each request's mask."""
        return self.q_lens * self.kv_lens

    def placed(self) -> Tensor:
        """int64 [2, T] on the host, of each query: keys before the request's first query, which are
        fewer than none where it has more queries than keys, and the query's own position."""
        past = (self.kv_lens - self.q_lens).repeat_interleave(self.q_lens)
        first = (self.q_lens.cumsum(0) - self.q_lens).repeat_interleave(self.q_lens)
        return torch.stack([past, past + torch.arange(len(past)) - first])


def checked_requests(arrays: Buffers, page_size: int) -> Requests:
    """Reads the lengths on the host.

    Raises:
        ValueError: an array's shape is wrong, offsets fall, or a page holds more than it can.
    """
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")
    count = arrays[3].shape[0]
    extents: tuple[int | str, ...] = (count + 1, count + 1, "pages", count)
    for name, array, extent in zip(_NAMES, arrays, extents, strict=True):
        expect_shape(name, array, (extent,))
    if not count:
        raise ValueError("qo_indptr must have at least one request, got none")
    offsets, pages, last = (arrays[i].cpu().long() for i in (0, 1, 3))
    for name, given in (("qo_indptr", offsets), ("paged_kv_indptr", pages)):
        if int(given[0]) != 0 or bool((given.diff() < 0).any()):
            raise ValueError(f"{name} must begin at 0 and not fall, got {given.tolist()}")
    if int(pages[-1]) > len(arrays[2]):
        raise ValueError(
            f"paged_kv_indices must have at least the {int(pages[-1])} pages of paged_kv_indptr, "
            f"got {len(arrays[2])}"
        )
    has_pages = pages.diff() > 0
    if bool(((last < 1) | (last > page_size))[has_pages].any()):
        raise ValueError(
            f"paged_kv_last_page_len must be 1 to {page_size} where a request has pages, got "
            f"{last.tolist()}"
        )
    kv_lens = torch.where(has_pages, (pages.diff() - 1) * page_size + last, 0)
    return Requests(arrays, offsets.diff(), kv_lens)


def checked_mask(
    custom: Tensor | None, packed: Tensor | None, requests: Requests, device: torch.device
) -> Tensor | None:
    """bool, the requests' [queries, keys] one after another, on the device; a packed mask goes
    before one that is not.

    Raises:
        ValueError: it has too few elements, or is not packed request by request.
    """
    if packed is not None:
        return unpacked("packed_custom_mask", packed, requests.elements).to(device)
    if custom is None:
        return None
    total = int(requests.elements.sum())
    if custom.numel() < total:
        raise ValueError(
            f"custom_mask must have an element for each query and key of a request, {total} "
            f"together, got {custom.numel()}"
        )
    return custom.to(device).flatten()[:total] != 0


def planned(
    requests: Requests,
    mask: Tensor | None,
    settings: Settings,
    blocks: tuple[int, int],
    device: torch.device,
) -> BlockPlan:
    """The plan of a step in memory of its own."""
    offsets, page_indptr, indices = (x.to(device, torch.int32) for x in requests.arrays[:3])
    kv_lens = requests.kv_lens.to(device, torch.int32)
    block_m, block_n = blocks
    window = settings.window_left
    if mask is None:
        return intervals.paged(
            offsets,
            kv_lens,
            page_indptr,
            indices,
            settings.page_size,
            max(int(requests.q_lens.max()), 1),
            max(int(requests.kv_lens.max()), 1),
            settings.num_qo_heads,
            is_causal=settings.causal,
            window=window + 1 if window >= 0 else None,
            block_m=block_m,
            block_n=block_n,
        )
    count = requests.elements
    first, length = (x.to(device) for x in (count.cumsum(0) - count, requests.kv_lens))
    past = (requests.kv_lens - requests.q_lens).to(device)

    def elements(request: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = mask[first[request] + query * length[request] + key]
        return seen & (key >= query + past[request] - window) if window >= 0 else seen

    sequences = intervals.paged_sequences(offsets, kv_lens, page_indptr)
    plan = bsr.from_elements(
        elements, sequences, settings.num_qo_heads, block_m=block_m, block_n=block_n
    )
    return replace(plan, pages=Pages(indices, settings.page_size), is_packed=True)


class GraphBuffers:
    """The memory of a wrapper that CUDA graphs keep: the caller's four buffers, and a plan with
    room for as many query tokens as the first has, and for all pages of the caller's buffer.

    Args:
        buffers: int32 query offsets [S + 1], offsets into the pages [S + 1], pages, and tokens in
            the last page [S].
        mask: uint8, room for the packed mask; its offsets int32 [S + 1]. ``None`` where plans have
            none.

    Raises:
        ValueError: a buffer is missing, or not as described.
    """

    def __init__(
        self,
        buffers: tuple[Tensor | None, ...],
        mask: tuple[Tensor | None, Tensor | None],
        device: torch.device,
    ) -> None:
        found = tuple(x for x in buffers if x is not None)
        if len(found) < 4:
            missing = [n for n, x in zip(_NAMES, buffers, strict=True) if x is None]
            raise ValueError(f"use_cuda_graph needs {missing[0]}_buf, got None")
        if (mask[0] is None) != (mask[1] is None):
            raise ValueError("custom_mask_buf and mask_indptr_buf must be given together")
        self._buffers: Buffers = found  # type: ignore[assignment]
        self.requests = found[3].shape[0]
        extents: tuple[int | str, ...] = (
            self.requests + 1,
            self.requests + 1,
            "pages",
            self.requests,
        )
        checks = [(f"{n}_buf", x, (e,)) for n, x, e in zip(_NAMES, found, extents, strict=True)]
        if mask[1] is not None:
            checks.append(("mask_indptr_buf", mask[1], (self.requests + 1,)))
        for name, buffer, shape in checks:
            expect_dtype(name, buffer, torch.int32)
            expect_shape(name, buffer, shape)
            expect_device(name, buffer, device)
            expect_stride(name, buffer, 0, 1)
        if mask[0] is not None:
            expect_dtype("custom_mask_buf", mask[0], torch.uint8)
        self.mask_bytes = None if mask[0] is None else mask[0].numel()
        self._plan: BlockPlan | None = None
        self._settings: Settings | None = None
        self.keys = 0
        self.tokens = 0
        self.placed: Tensor | None = None

    def check(self, requests: Requests, settings: Settings, max_keys: int | None) -> None:
        """Whether a step fits.

        Args:
            max_keys: no request of any plan has more; ``None`` is as many as the pages hold.

        Raises:
            ValueError: it has other settings or another number of requests than the first, or more
                query tokens, keys, pages or elements of a mask than there is room for.
        """
        if self._settings not in (None, settings):
            raise ValueError(
                "with use_cuda_graph every plan must have the settings of the first, "
                f"{self._settings}, got {settings}"
            )
        if settings.is_masked != (self.mask_bytes is not None):
            given = "with" if settings.is_masked else "without"
            raise ValueError(
                "with use_cuda_graph a custom mask must come with custom_mask_buf and "
                f"mask_indptr_buf, and they with a mask in every plan, got a plan {given} a mask"
            )
        room = len(self._buffers[2]) * settings.page_size
        keys = room if max_keys is None else min(max_keys, room)
        counts: list[tuple[str, int, int | None]] = [
            ("pages", len(requests.arrays[2]), len(self._buffers[2])),
            ("keys in one request", int(requests.kv_lens.max()), self.keys or keys),
            ("bytes of packed mask", int((-(-requests.elements // 8)).sum()), self.mask_bytes),
        ]
        if self._settings is not None:
            counts.append(("query tokens", requests.tokens, self.tokens))
        if len(requests.q_lens) != self.requests:
            raise ValueError(
                f"with use_cuda_graph plan must have the {self.requests} requests of the buffers, "
                f"got {len(requests.q_lens)}"
            )
        for what, got, most in counts:
            if most is not None and got > most:
                raise ValueError(
                    f"with use_cuda_graph plan must have at most {most} {what}, got {got}"
                )
        self.keys = self.keys or keys

    def write(self, requests: Requests, settings: Settings, plan: BlockPlan) -> BlockPlan:
        """A plan that ``check`` allows, in the same memory as the plans before."""
        if self._settings is None:
            self._settings, self.tokens = settings, requests.tokens
        with torch.inference_mode():  # in which buffers and plans may have been made
            for buffer, array in zip(self._buffers, requests.arrays, strict=True):
                buffer[: len(array)].copy_(array)
        pages = Pages(self._buffers[2], settings.page_size)
        plan = replace(padded(plan, **self._room(plan)), pages=pages, has_partial=True)
        placed = torch.nn.functional.pad(requests.placed(), (0, self.tokens - requests.tokens))
        if self._plan is None or self.placed is None:
            self._plan, self.placed = plan, placed.to(plan.device)
        else:
            self._plan.copy_(plan)
            with torch.inference_mode():
                self.placed.copy_(placed)
        return self._plan

    def _room(self, plan: BlockPlan) -> dict[str, int]:
        """The most entries that a plan of these buffers can have: see ``padded``.

        A request of q queries and k keys has at most (q / block_m + 1) (k / block_n + 1) blocks.
        """
        assert self._settings is not None
        m, n = plan.block_m, plan.block_n
        tiles = self.requests + self.tokens // m
        blocks = -(-self.keys // n)
        slots = 0
        if self.mask_bytes is not None:
            keys = len(self._buffers[2]) * self._settings.page_size
            slots = -(-8 * self.mask_bytes // (m * n)) - (-self.tokens // m) - (-keys // n)
            cols = slots = slots + self.requests
        elif self._settings.window_left >= 0:
            window, causal = self._settings.window_left + 1, self._settings.causal
            cols = tiles * intervals.window_blocks(window, blocks, m, n, causal)
        else:
            cols = blocks
        work = tiles * self._settings.num_qo_heads
        return {"work": work, "rows": tiles, "cols": max(cols, 1), "slots": max(slots, 1)}
