"""The contents of state and cache by the float64 definition, and how far a kernel may be off."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4_backend import CompressorLayer, CompressorSpec, RecordSpec, reference
from dsv4_backend.testing.engine import POISON


def expected_rows(layer: CompressorLayer, history: torch.Tensor) -> torch.Tensor:
    """The finished float64 rows of all windows of a sequence, by the definition."""
    pooled = reference.pool_sequence(history, layer.ape)
    positions = torch.arange(pooled.shape[0], device=history.device) * layer.spec.compress_ratio
    return reference.finish_rows(pooled, positions, layer)


def equal_share(
    caches: Sequence[torch.Tensor], spec: CompressorSpec, want: dict[int, torch.Tensor]
) -> float:
    """The share of the records' bytes that are those of the float64 rows in ``want``, by slot, or
    of their values, whichever is larger: a zero has two codes.

    Where a byte is not that of the row, its value must lie between those of the row moved down and
    up by what fp32 cannot tell apart; bytes outside the records must be poison. Else this is an
    AssertionError.
    """
    slots = torch.tensor(sorted(want), dtype=torch.int64)
    assert all(bool((x == POISON).all()) for x in without_records(caches, slots, spec)), (
        "a byte outside the written slots changed"
    )
    if not want:
        return 1.0
    rows = torch.stack([want[int(slot)] for slot in slots])
    data, scales = reference.load(caches, slots, spec)
    # An fp32 sum of r rows of mixed signs errs by about sqrt(r) roundings of its larger terms.
    move = 2.5e-7 * spec.compress_ratio**0.5 * rows.abs().amax(1, keepdim=True)
    tries = [reference.quantise(rows + d * move, spec) for d in (0, 1, -1)]
    want_data, want_scales = tries[0]
    got = reference.dequantise(data, scales, spec)
    _, high, low = (reference.dequantise(*t, spec) for t in tries)
    if spec.record.encoding == "indexer_fp8" and spec.rounding == "sglang":
        scale, want_scale = (x.contiguous().view(torch.float32) for x in (scales, want_scales))
        torch.testing.assert_close(scale, want_scale, rtol=2e-6, atol=0)
        slack = 2e-6 * got.abs()
    else:
        assert torch.stack([scales == t[1] for t in tries]).any(0).all()
        slack = torch.zeros_like(got)
    right = (torch.minimum(low, high) - slack <= got) & (got <= torch.maximum(low, high) + slack)
    assert right.all(), f"{(~right).sum()} of {right.numel()} values differ"
    same_bytes, same_values = data == want_data, got == reference.dequantise(*tries[0], spec)
    return max(float(x.float().mean()) for x in (same_bytes, same_values))


def without_records(
    caches: Sequence[torch.Tensor], slots: torch.Tensor, spec: RecordSpec
) -> list[torch.Tensor]:
    """Copies of the caches with poison in these slots."""
    outside, record = [cache.clone() for cache in caches], spec.record
    data = torch.full((len(slots), record.data_bytes), POISON, dtype=torch.uint8)
    scales = torch.full((len(slots), record.scale_bytes), POISON, dtype=torch.uint8)
    device = caches[0].device
    reference.store(outside, slots, spec, data.to(device), scales.to(device))
    return outside


Record = tuple[torch.Tensor, torch.Tensor]


def within_one_code(spec: RecordSpec, got: Record, want: Record) -> torch.Tensor:
    """Mark the values, ``[N, d]``, of records (data, scales) that are at most one code apart.

    The step from one e2m1 value to the next larger one is at most half of it, or half a unit of the
    scale; steps of e4m3 and bf16 are bounded by the row's largest value.
    """
    one, other = (reference.dequantise(*record, spec).abs() for record in (got, want))
    apart = (reference.dequantise(*got, spec) - reference.dequantise(*want, spec)).abs()
    if spec.record.encoding not in ("indexer_mxfp4", "nvfp4_rows"):
        return apart <= other.amax(1, keepdim=True) / 64 + 0.26 * other
    data = torch.full_like(got[0], 0x22)  # two codes of 1.0
    units = [reference.dequantise(data, scales, spec) for _, scales in (got, want)]
    return apart <= 0.505 * torch.maximum(torch.maximum(*units), torch.minimum(one, other))
