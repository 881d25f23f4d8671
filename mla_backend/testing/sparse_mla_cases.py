"""Inputs of sparse MLA: poisoned caches of records, ragged lists, and FlashMLA's tolerances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mla_backend import reference_sparse_mla as reference
from mla_backend.contract.sparse_mla import NamedRows
from mla_backend.scratch import SplitScratch
from mla_backend.sparse_mla import SparseMlaSelection, sparse_mla
from mla_backend.spec_sparse_mla import SparseMlaSpec

SCALE = 512**-0.5
Result = tuple[torch.Tensor, torch.Tensor]


def write_records(rows: torch.Tensor, page_bytes: int | None = None) -> torch.Tensor:
    """A cache of fp8_ds_mla records of these numbers.

    Args:
        rows: ``[pages, page size, 512]``.
        page_bytes: from page to page; by default 584 per row, rounded up to a multiple of 576.

    Returns:
        ``[pages, page size, 584]`` uint8; the memory between pages holds 0xFF.
    """
    pages, size, _ = rows.shape
    page_bytes = page_bytes or -(-size * 584 // 576) * 576
    groups = rows[..., :448].float().reshape(pages, size, 7, 64)
    amax = groups.abs().amax(-1).clamp_min(1e-4)
    exponent = torch.ceil(torch.log2(amax / 448)).clamp(-127, 127)
    values = (groups * torch.exp2(-exponent)[..., None]).to(torch.float8_e4m3fn)
    memory = torch.full((pages, page_bytes), 0xFF, dtype=torch.uint8, device=rows.device)
    data = memory[:, : size * 576].view(pages, size, 576)
    data[..., :448] = values.flatten(-2).view(torch.uint8)
    data[..., 448:] = rows[..., 448:].bfloat16().contiguous().view(torch.uint8)
    scales = memory[:, size * 576 : size * 584].view(pages, size, 8)
    scales[..., :7] = (exponent + 127).to(torch.uint8)
    scales[..., 7] = 0
    return memory.as_strided((pages, size, 584), (page_bytes, 584, 1))


@dataclass
class SparseCase:
    """One call. ``plain`` are the caches' numbers for the reference."""

    spec: SparseMlaSpec
    q: torch.Tensor
    rows: NamedRows
    extra: NamedRows | None
    plain: list[torch.Tensor]
    sinks: torch.Tensor | None = None


def make_case(
    heads: int,
    lists: Sequence[tuple[int, int, Sequence[int] | None]],
    *,
    requests: int = 3,
    tokens: int = 1,
    seed: int = 0,
    page_bytes: int | None = None,
    invalid: float = 0.1,
    has_sinks: bool = False,
    device: torch.device | None = None,
) -> SparseCase:
    """Every row that no counted index names is NaN, and so is what lies between pages.

    Keys are of the size of FlashMLA's tests, whose tolerances are absolute in part.

    Args:
        lists: for each cache its page size, the length of its lists, and how many entries count
            for each request or ``None``.
        invalid: share of the entries that are -1, or beyond the cache.
    """
    device = device or torch.device("cpu")
    generator = torch.Generator().manual_seed(seed)
    given, plain = [], []
    for size, topk, counts in lists:
        pages = -(-(topk * 2 + 5) // size)
        numbers = 0.05 * torch.randn(pages, size, 512, generator=generator)
        # groups of very different size, so that a scale that is another's shows
        numbers[..., :448] *= torch.exp2(torch.arange(7) - 3.0).repeat_interleave(64)
        cache = write_records(numbers, page_bytes)
        shape = (requests, tokens, topk)
        indices = torch.randint(0, pages * size, shape, generator=generator, dtype=torch.int32)
        wrong = torch.rand(shape, generator=generator) < invalid
        beyond = torch.rand(shape, generator=generator) < 0.3
        away = torch.where(beyond, pages * size, -1).to(torch.int32)
        indices = torch.where(wrong, away, indices)
        lengths = None if counts is None else torch.tensor(counts, dtype=torch.int32)
        named = torch.zeros(pages * size, dtype=torch.bool)
        for i in range(requests):
            count = topk if counts is None else max(0, counts[i])
            seen = indices[i, :, :count].flatten().long()
            named[seen[(seen >= 0) & (seen < pages * size)]] = True
        _poison(cache, ~named.view(pages, size))
        given.append(
            NamedRows(
                _move(cache, device),
                indices.to(device),
                None if lengths is None else lengths.to(device),
            )
        )
        plain.append(reference.read_records(cache).view(-1, 512).to(device))
    extra = given[1] if len(given) > 1 else None
    spec = SparseMlaSpec(
        heads, page_size=lists[0][0], extra_page_size=lists[1][0] if extra is not None else 0
    )
    q = 8 * torch.randn(requests, tokens, heads, 512, generator=generator)
    q = q.bfloat16().to(device)
    sinks = 4 + 2 * torch.randn(heads, generator=generator)  # about as heavy as the keys
    return SparseCase(spec, q, given[0], extra, plain, sinks.to(device) if has_sinks else None)


def _poison(cache: torch.Tensor, unnamed: torch.Tensor) -> None:
    """NaN in data and scales of rows: e4m3 0x7F, bf16 0x7F7F is finite, so 0xFF for all."""
    pages, size = unnamed.shape
    stride = cache.stride(0)
    data = cache.as_strided((pages, size, 576), (stride, 576, 1))
    scales = cache.as_strided((pages, size, 8), (stride, 8, 1), size * 576)
    data[unnamed] = 0xFF
    scales[unnamed] = 0xFF


def _move(cache: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The cache with its memory between pages."""
    pages, size, width = cache.shape
    memory = cache.as_strided((pages, cache.stride(0)), (cache.stride(0), 1)).to(device)
    return memory.as_strided((pages, size, width), cache.stride())


def run_case(case: SparseCase, selection: SparseMlaSelection, splits: int | None = None) -> Result:
    """The operator on poisoned outputs and scratch."""
    shape = case.q.shape
    out = torch.full(shape, float("nan"), dtype=case.q.dtype, device=case.q.device)
    lse = torch.full(shape[:3], float("nan"), device=out.device)
    scratch = SplitScratch(out.device)
    for tensor in scratch.reserve(shape[0] * shape[1] * (splits or 16), shape[2], 512):
        tensor.fill_(float("nan"))
    return sparse_mla(
        case.q,
        case.rows,
        selection,
        scale=SCALE,
        extra=case.extra,
        sinks=case.sinks,
        out=out,
        lse=lse,
        splits=splits,
        scratch=scratch,
    )


def expected(case: SparseCase) -> Result:
    given = [case.rows] + ([case.extra] if case.extra is not None else [])
    lists = [(numbers, x.indices, x.lengths) for numbers, x in zip(case.plain, given, strict=True)]
    return reference.sparse_mla(case.q, lists, SCALE, sinks=case.sinks)


def disagreement(got: Result, want: Result) -> str | None:
    """Name what is not within FlashMLA's tolerances of sparse decoding; ``None`` where all is.

    Of the output: each element within 1e-3 or 2.01 / 128 of itself, and 1 minus the cosine within
    5e-6; of the LSE 1e-6 or 8.01 / 65536. Rows without keys exactly 0 and +inf. On a CPU the cosine
    has 1.5e-5, since Triton's interpreter truncates to bf16.
    """
    out, lse = got[0].double(), got[1].double()
    if out.isnan().any() or lse.isnan().any():
        return "NaN in the output or the LSE"
    none = want[1] == float("inf")
    if not ((lse[none] == float("inf")).all() and (out[none] == 0).all()):
        return "a row without keys must have output 0 and LSE +inf"
    if not want[0].any():
        return None
    error = (out - want[0]).abs()
    if not ((error < 1e-3) | (error < 2.01 / 128 * want[0].abs())).all():
        return f"error of the output {float(error.max()):.2e}"
    cosine = 2 * (out * want[0]).sum() / (out.square().sum() + want[0].square().sum())
    if not 1 - cosine < (5e-6 if out.is_cuda else 1.5e-5):
        return f"1 - cosine {float(1 - cosine):.2e}"
    error = (lse - want[1])[~none].abs()
    if not ((error < 1e-6) | (error < 8.01 / 65536 * want[1][~none].abs())).all():
        return f"error of the LSE {float(error.max()):.2e}"
    return None


def assert_close(got: Result, want: Result) -> None:
    """Within FlashMLA's tolerances of sparse decoding."""
    found = disagreement(got, want)
    assert found is None, found
