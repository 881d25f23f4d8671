"""A compressor step's records, beside float64 and beside another implementation's records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsv4_backend import (
    CompressorSpec,
    PagedDecode,
    PagedPrefill,
    RingDecode,
    RingPrefill,
    reference,
)
from dsv4_backend.testing.engine import POISON
from dsv4_backend.testing.steps import TimedStep


@dataclass(frozen=True)
class Written:
    """The memory after one call.

    Attributes:
        data, scales: [E, bytes] uint8 of the records, in the order of their tokens; without the
            padding byte after seven scales, which sglang leaves alone.
        rows: [M, row_width], the state rows of the step.
        outside: whether any other byte of the cache or row of the state changed.
    """

    data: torch.Tensor
    scales: torch.Tensor
    rows: torch.Tensor
    outside: bool


def ends_of(part: TimedStep) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token [E], position [E], slot [E]) of the windows that end in the step."""
    plan, ratio = part.step_plan, part.layer.spec.compress_ratio
    if isinstance(plan, PagedDecode | PagedPrefill):
        positions = plan.positions
    elif isinstance(plan, RingDecode):
        positions = plan.entries[:, 0].long() - 1
    else:
        positions = torch.arange(plan.num_tokens, device=plan.slots.device)
    tokens = ((positions + 1) % ratio == 0).nonzero()[:, 0]
    return tokens, positions[tokens], plan.slots[tokens]


def _written_rows(part: TimedStep) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token, state row, row expected there) of each state row that the step writes."""
    plan, layer = part.step_plan, part.layer
    if isinstance(plan, PagedDecode | PagedPrefill):
        tokens, rows = torch.arange(plan.num_tokens, device=plan.slots.device), plan.state_slots
        want, half = part.kv_score.clone(), layer.spec.row_width // 2
        want[:, half:] += layer.ape[plan.positions % layer.spec.compress_ratio].flatten(1)
        return tokens, rows, want
    if isinstance(plan, RingDecode):
        return torch.arange(plan.num_tokens), plan.entries[:, 1].long(), part.kv_score
    assert isinstance(plan, RingPrefill)
    tokens, rows = plan.writes.long().unbind(1)
    return tokens, rows, part.kv_score[tokens]


def run(part: TimedStep, call: Callable[[], object]) -> Written:
    """Call with poison in the cache and NaN in the state rows to write, then put the state back."""
    spec, before = part.layer.spec, part.state.clone()
    _, rows, _ = _written_rows(part)
    _, _, slots = ends_of(part)
    part.state.flatten(0, 1)[rows] = torch.nan
    part.cache.fill_(POISON)
    call()
    data, scales = (part.cache.flatten()[at] for at in _places(slots, part.cache.shape[1], spec))
    got = part.state.flatten(0, 1)[rows].clone()
    part.state.flatten(0, 1)[rows] = before.flatten(0, 1)[rows]
    outside = not torch.equal(part.state, before)
    for at in _places(slots, part.cache.shape[1], spec, padding=True):
        part.cache.view(-1)[at] = POISON
    outside |= bool((part.cache != POISON).any())
    part.state.copy_(before)
    return Written(data, scales, got, outside)


def _places(
    slots: torch.Tensor, page_bytes: int, spec: CompressorSpec, padding: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the records' data and scales lie in the cache, [E, bytes] each."""
    width, count = spec.record.data_bytes, spec.record.scale_bytes
    page, i = slots // spec.page_tokens * page_bytes, slots % spec.page_tokens
    data = (page + i * width)[:, None] + torch.arange(width, device=slots.device)
    scales = (page + spec.page_tokens * width + i * count)[:, None]
    used = 7 if spec.cache_format == "fp8_ds_mla" and not padding else count
    return data, scales + torch.arange(used, device=slots.device)


def float64_rows(part: TimedStep) -> torch.Tensor:
    """[E, d] finished rows by the definition, from the state before the call and its input."""
    spec, plan, layer = part.layer.spec, part.step_plan, part.layer
    tokens, positions, _ = ends_of(part)
    ratio, window, d = spec.compress_ratio, spec.window, spec.head_dim
    back = torch.arange(1 - window, 1, device=tokens.device)
    at = positions[:, None] + back  # [E, W] positions of the window's rows
    half = (back > -ratio).long() * (spec.halves - 1)
    _, rows, want = _written_rows(part)
    has_ape = isinstance(plan, PagedDecode | PagedPrefill)
    if isinstance(plan, PagedPrefill | RingPrefill):
        source, where = (want if has_ape else part.kv_score), at.clamp(min=0)
    else:
        source = part.state.flatten(0, 1).clone()
        source[rows] = want
        block = part.state.shape[1]
        if isinstance(plan, PagedDecode):
            page = plan.block_table[plan.requests[tokens].long()[:, None], at.clamp(min=0) // block]
        else:
            assert isinstance(plan, RingDecode)
            past, own = plan.entries[tokens, 2:].long().unbind(1)
            page = torch.where(back > -ratio, own[:, None], past[:, None])
        where = page.long() * block + at.clamp(min=0) % block
    found = source.view(len(source), 2, spec.halves, d)
    kv, score = (found[where, k, half].double() for k in (0, 1))
    if not has_ape:
        score += layer.ape[at % ratio, half].double()
    score[at < 0] = -torch.inf
    return reference.finish_rows(reference.pool(kv, score), positions + 1 - ratio, layer)


def beside_float64(part: TimedStep, rows: torch.Tensor, written: Written) -> float:
    """The share of the records' bytes that are the quantised float64 rows'.

    Raises:
        ArithmeticError: fewer than 99 % are and eight bytes or more are not, a value is off by more
            than e4m3 rounds, a state row differs, or anything else changed.
    """
    _, _, want = _written_rows(part)
    if not torch.equal(written.rows, want):
        raise ArithmeticError(f"{int((written.rows != want).sum())} values of the states differ")
    if written.outside:
        raise ArithmeticError(
            "a byte outside the records, or a state row of another token, changed"
        )
    if not len(rows):
        return 1.0
    data, scales = reference.quantise(rows, part.layer.spec)
    share = equal_share(written, Written(data, scales[:, : written.scales.shape[1]], want, False))
    worst = difference(part, written, rows)
    # e4m3 rounds by 1/16 of a value at most; bf16 and the fp32 sums add far less
    few = (1 - share) * (data.numel() + scales.numel()) < 8  # in a record or two
    if (share < 0.99 and not few) or not worst < 0.07:
        raise ArithmeticError(f"{share:.4f} of the bytes are float64's, off by up to {worst:.3f}")
    return share


def equal_share(one: Written, other: Written) -> float:
    """Of the bytes of data and scales; a float scale is equal up to its last bits."""
    equal = int((one.data == other.data).sum())
    if one.scales.shape[1] == 4:
        scale, wanted = (x.scales.contiguous().view(torch.float32) for x in (one, other))
        equal += 4 * int(torch.isclose(scale, wanted, rtol=2e-6, atol=0).sum())
    else:
        equal += int((one.scales == other.scales).sum())
    return equal / max(one.data.numel() + one.scales.numel(), 1)


def values(part: TimedStep, written: Written) -> torch.Tensor:
    """[E, d] what an attention kernel reads from the records."""
    return reference.dequantise(written.data, written.scales, part.layer.spec)


def difference(part: TimedStep, written: Written, rows: torch.Tensor) -> float:
    """The largest difference of a value from ``rows [E, d]``, over the largest of its row."""
    if not len(rows):
        return 0.0
    off = (values(part, written).double() - rows.double()).abs().amax(1)
    return float((off / rows.double().abs().amax(1)).max())
