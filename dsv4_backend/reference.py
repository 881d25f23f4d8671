"""The compressor by its definition, in torch: any device, any float dtype up to float64.

Per window, in the notation of ``docs/families/dsv4.md``: k = sum_w softmax_w(s + ape) · kv per
channel; RMSNorm; RoPE on the last 64 channels at the window's first position; H_d / sqrt(d) if the
compressor rotates; quantisation. Sources: sglang's ``fused_norm_rope_v2.cuh`` and vLLM's
``fused_compress_quant_cache.py``, which differ in where they round to bf16 and in how they choose
scales. ``rounding`` names the engine that is followed:

- ``vllm``: bf16 once, before quantisation; scales are powers of two;
- ``sglang``: bf16 once, before quantisation, for the main rows, never for the indexer's; the
  indexer's fp8 scale is amax / 448 itself; fp4 ties go to the smaller magnitude, and zero has no
  sign;
- ``aiter``: sglang's MXFP4 indexer on AMD, which is aiter's: fp4 as in ``vllm``, from fp32;
- ``sglang_v41``: sglang's V4.1, which quantises twice: main rows to NVFP4 and then to fp8, the
  indexer's to MXFP4 as in ``vllm``, and once more with scales of at least 2^-13 and a zero without
  a sign. Its pooled rows are bf16 before their norm.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from dsv4_backend.spec import (
    ROPE_DIM,
    CompressorLayer,
    Fp8Flavour,
    RecordSpec,
    RopeLayout,
    V41Layer,
)

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """To the nearest bf16 (by way of fp32, as a kernel that computes in fp32 does)."""
    return x.float().bfloat16().to(x.dtype)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x @ H / sqrt(d), H the Sylvester matrix of order d = x.shape[-1], a power of two."""
    shape, d = x.shape, x.shape[-1]
    half = 1
    while half < d:
        a, b = x.reshape(-1, d // (2 * half), 2, half).unbind(2)
        x = torch.stack((a + b, a - b), dim=2)
        half *= 2
    return x.reshape(shape).mul(float(d) ** -0.5)


def rope(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, layout: RopeLayout
) -> torch.Tensor:
    """Rotate the interleaved pairs of the last 64 channels of x [N, d].

    Args:
        table: [positions, 64] as in ``CompressorLayer``.
        positions: [N], rows of the table.
    """
    rows = table[positions.long()].to(x.dtype)
    if layout == "interleaved":
        cos, sin = rows[:, 0::2], rows[:, 1::2]
    else:
        cos, sin = rows.chunk(2, dim=1)
    head, tail = x[:, :-ROPE_DIM], x[:, -ROPE_DIM:]
    re, im = tail[:, 0::2], tail[:, 1::2]
    rotated = torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1)
    return torch.cat((head, rotated.flatten(1)), dim=1)


def pool(kv: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """Softmax-weighted sum over dimension -2, for each channel: [..., W, d] to [..., d].

    A score of -inf drops its row.
    """
    return (score.softmax(-2) * kv).sum(-2)


def pool_sequence(kv_score: torch.Tensor, ape: torch.Tensor) -> torch.Tensor:
    """All windows of one whole sequence in float64, before the norm.

    Args:
        kv_score: [T, 2·C·d], the projections of tokens 0 to T - 1 without APE.
        ape: [r, C, d].

    Returns:
        [T // r, d]. Window i pools tokens i·r to i·r + r - 1, with the last half of the channels,
        and for C = 2 the r tokens before them, with the first half; token -1 and before have score
        -inf.
    """
    r, c, d = ape.shape
    n = kv_score.shape[0] // r
    kv, score = kv_score[: n * r].double().view(n, r, 2, c, d).unbind(2)
    score = score + ape.double()
    own_kv, own_score = kv[:, :, c - 1], score[:, :, c - 1]
    if c == 1:
        return pool(own_kv, own_score)
    past_kv = torch.cat((torch.zeros_like(kv[:1, :, 0]), kv[:-1, :, 0]))
    past_score = torch.cat((torch.full_like(score[:1, :, 0], -torch.inf), score[:-1, :, 0]))
    return pool(torch.cat((past_kv, own_kv), 1), torch.cat((past_score, own_score), 1))


def finish(
    k: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    *,
    eps: float,
    rope_layout: RopeLayout,
    rotate: bool,
) -> torch.Tensor:
    """Norm, RoPE and rotation of pooled rows k [N, d] at positions [N]; result in k's dtype."""
    k = rope(_rms_norm(k, weight, eps), table, positions, rope_layout)
    return hadamard(k) if rotate else k


def finish_rows(k: torch.Tensor, positions: torch.Tensor, layer: CompressorLayer) -> torch.Tensor:
    """``finish`` with a layer's weights and its spec."""
    spec = layer.spec
    return finish(
        k,
        positions,
        layer.norm_weight,
        layer.rope_table,
        eps=spec.eps,
        rope_layout=spec.rope_layout,
        rotate=spec.rotate,
    )


def latents(kv_score: torch.Tensor, layer: V41Layer) -> torch.Tensor:
    """DeepSeek-V4.1's latents of one whole sequence, with values of bf16.

    Args:
        kv_score: [T, 512·r] projections of tokens 0 to T - 1: [kv] of ratio 1, [kv | score] of 2.

    Returns:
        [T // r, 512] float64: tokens i·r to i·r + r - 1 pooled, then normalised and rounded.
    """
    ratio = layer.spec.compress_ratio
    groups = kv_score[: len(kv_score) // ratio * ratio].double()
    if ratio == 2:
        kv, score = groups.view(len(groups) // 2, 2, 2, -1).unbind(2)
        groups = pool(kv, score)
    if layer.spec.main.rounding == "sglang_v41":
        groups = round_bf16(groups)
    return round_bf16(_rms_norm(groups, layer.norm_weight, layer.spec.eps))


def v41_rows(
    latent: torch.Tensor, positions: torch.Tensor, layer: V41Layer
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows [N, 512] and [N, 128] that are quantised for attention and for the indexer.

    Args:
        latent: [N, 512]; positions: [N] of the first token of each latent's group.
    """
    spec, table = layer.spec, layer.rope_table
    key = round_bf16(latent @ layer.key_projection.to(latent.dtype).T)
    key = round_bf16(_rms_norm(key, layer.key_norm_weight, spec.eps))
    main, key = (rope(x, table, positions, spec.rope_layout) for x in (latent, key))
    return main, key


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(x.dtype)


def encode_e4m3(x: torch.Tensor, fp8: Fp8Flavour) -> torch.Tensor:
    """e4m3 codes, uint8, of values already in range; in float64 too the fp32 value is encoded."""
    dtype = torch.float8_e4m3fn if fp8 == "ocp" else torch.float8_e4m3fnuz
    return x.float().to(dtype).view(torch.uint8)


def decode_e4m3(code: torch.Tensor, fp8: Fp8Flavour) -> torch.Tensor:
    """fp32 values of e4m3 codes."""
    return code.view(torch.float8_e4m3fn if fp8 == "ocp" else torch.float8_e4m3fnuz).float()


def encode_e2m1(x: torch.Tensor, ties_even: bool) -> torch.Tensor:
    """e2m1 codes 0 to 15, uint8; magnitudes above 6 saturate.

    Args:
        ties_even: to the even code, and keep the sign of zero; otherwise to the smaller magnitude,
            and zero has no sign.
    """
    levels = torch.tensor(_E2M1, dtype=x.dtype, device=x.device)
    middle = (levels[1:] + levels[:-1]) / 2
    code = torch.bucketize(x.abs(), middle)  # a tie goes down
    if ties_even:
        up = torch.bucketize(x.abs(), middle, right=True)
        code = torch.where(code % 2 == 0, code, up)
    sign = torch.signbit(x) if ties_even else torch.signbit(x) & (code > 0)
    return (code + 8 * sign).to(torch.uint8)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """fp32 values of e2m1 codes."""
    levels = torch.tensor(_E2M1, device=code.device)
    return torch.where(code >= 8, -levels[code.long() % 8], levels[code.long() % 8])


def ceil_log2(x: torch.Tensor) -> torch.Tensor:
    """Smallest integer k with x <= 2^k, exactly; x positive, of x's dtype."""
    mantissa, exponent = torch.frexp(x)  # 1/2 <= mantissa < 1
    return exponent - (mantissa == 0.5).to(exponent.dtype)


def quantise(x: torch.Tensor, spec: RecordSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Finished rows [N, d] as the bytes of ``spec.cache_format``.

    Returns:
        data [N, data bytes] and scales [N, scale bytes], both uint8 (``backend_core.formats``).
    """
    n, d = x.shape
    fp8, rounding = spec.fp8, spec.rounding
    top = 448.0 if fp8 == "ocp" else 224.0
    none = torch.empty((n, 0), dtype=torch.uint8, device=x.device)
    encoding = spec.record.encoding
    # V4.1's interleaved records are taken from fp32, behind a latent of bf16
    if not spec.record.is_interleaved and (d == 512 or rounding in ("vllm", "sglang_v41")):
        x = round_bf16(x)
    if rounding == "sglang_v41":  # a zero that is quantised first loses its sign
        first = replace(spec, cache_format="nvfp4_rows" if d == 512 else encoding, rounding="vllm")
        x = dequantise(*quantise(x + 0.0, first), first).to(x.dtype)
    if encoding == "mxfp8_rows":
        groups = x.view(n, 16, 32)
        k = ceil_log2(groups.abs().amax(-1).clamp(min=1e-4) / top)
        codes = encode_e4m3(groups * torch.exp2(-k.to(x.dtype))[..., None], fp8).flatten(1)
        return codes, (k + 127).to(torch.uint8)
    if encoding == "nvfp4_rows":
        groups = x.view(n, 32, 16)
        scale = encode_e4m3((groups.abs().amax(-1) / 6).clamp(2.0**-9, 448.0), fp8)
        unit = decode_e4m3(scale, fp8).to(x.dtype)
        code = encode_e2m1(groups / unit[..., None], ties_even=True).flatten(1)
        return code[:, 0::2] | (code[:, 1::2] << 4), scale
    if encoding == "bf16_rows":
        return x.float().bfloat16().view(torch.uint8), none
    if encoding == "fp8_ds_mla":
        groups = x[:, :-ROPE_DIM].view(n, -1, 64)
        k = ceil_log2(groups.abs().amax(-1).clamp(min=1e-4) / top)
        codes = encode_e4m3(groups * torch.exp2(-k.to(x.dtype))[..., None], fp8).flatten(1)
        tail = x[:, -ROPE_DIM:].float().bfloat16().view(torch.uint8)
        pad = torch.zeros((n, 1), dtype=torch.uint8, device=x.device)
        return torch.cat((codes, tail), 1), torch.cat(((k + 127).to(torch.uint8), pad), 1)
    if encoding == "indexer_fp8_ue8m0":
        k = ceil_log2(x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / top)
        codes = encode_e4m3(x * torch.exp2(-k.to(x.dtype)), fp8)
        return codes, (k + 127).to(torch.uint8).expand(n, 4)
    if encoding == "indexer_fp8":
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / top
        if rounding != "sglang":
            scale = torch.exp2(ceil_log2(scale).to(x.dtype))
        return encode_e4m3((x / scale).clamp(-top, top), fp8), scale.float().view(torch.uint8)
    groups = x.view(n, d // 32, 32)
    floors = {"sglang": 1e-4, "sglang_v41": 6 * 2.0**-13}
    floor = floors.get(rounding, 6 * 2.0**-126)
    k = ceil_log2(groups.abs().amax(-1).clamp(min=floor) / 6)
    code = encode_e2m1(groups * torch.exp2(-k.to(x.dtype))[..., None], rounding != "sglang")
    code = code.flatten(1)
    if rounding == "sglang_v41":
        code = torch.where(code == 8, 0, code)
    return code[:, 0::2] | (code[:, 1::2] << 4), (k + 127).to(torch.uint8)


def dequantise(data: torch.Tensor, scales: torch.Tensor, spec: RecordSpec) -> torch.Tensor:
    """The values that an engine reads from the bytes of ``quantise``: [N, d] fp32."""
    encoding = spec.record.encoding
    if encoding == "bf16_rows":
        return data.contiguous().view(torch.bfloat16).float()
    if encoding == "indexer_fp8":
        return decode_e4m3(data, spec.fp8) * scales.contiguous().view(torch.float32)
    if encoding == "fp8_ds_mla":
        k = scales[:, :7].float() - 127
        codes = decode_e4m3(data[:, :448].contiguous(), spec.fp8).view(-1, 7, 64)
        tail = data[:, 448:].contiguous().view(torch.bfloat16).float()
        return torch.cat(((codes * torch.exp2(k)[..., None]).flatten(1), tail), 1)
    if encoding in ("mxfp8_rows", "indexer_fp8_ue8m0"):
        codes = decode_e4m3(data.contiguous(), spec.fp8).view(len(data), -1, 32)
        return (codes * torch.exp2(scales.float() - 127)[..., None]).flatten(1)
    code = torch.stack((data & 15, data >> 4), -1).flatten(1)
    if encoding == "nvfp4_rows":
        units = decode_e4m3(scales.contiguous(), spec.fp8)
        return (decode_e2m1(code).view(-1, 32, 16) * units[..., None]).flatten(1)
    k = scales.float() - 127
    return (decode_e2m1(code).view(-1, 4, 32) * torch.exp2(k)[..., None]).flatten(1)


Places = tuple[torch.Tensor, torch.Tensor]
"""Where bytes of the records lie in the pages of one tensor: offsets [page tokens, n] in the page,
and the columns [n] of [data | scales] that lie there."""


@functools.cache
def places(spec: RecordSpec) -> tuple[Places, ...]:
    """Where each byte of the records of a page lies, for each tensor that the format has; on the
    CPU, whatever torch's default device."""
    with torch.device("cpu"):
        return _places(spec)


def _places(spec: RecordSpec) -> tuple[Places, ...]:
    record, cache_format, page_tokens = spec.record, spec.cache_format, spec.page_tokens
    d, s, tile = record.data_bytes, record.scale_bytes, record.tile_tokens
    i = torch.arange(page_tokens)[:, None]
    b, g = torch.arange(d), torch.arange(s)
    if cache_format == "fp8_two_pools":
        codes, twice = b[:448], torch.arange(14)
        row = torch.cat((codes, 448 + twice)) + 512 * i
        first = row, torch.cat((codes, d + twice // 2))
        return first, (torch.arange(128) + 128 * i, b[448:])
    if record.is_interleaved:
        row = torch.arange(d + s)
        return ((i * (d + s) + row, row),)
    data = i * d + b
    if tile > 1:  # [tiles, bytes / 16, tile, 16]
        data = (i // tile) * (tile * d) + (b // 16) * (tile * 16) + (i % tile) * 16 + b % 16
    if cache_format == "indexer_mxfp4_planes":
        return (data, b), (g * 64 + (i % 16) * 4 + i // 16, d + g)
    scales = page_tokens * d + i * s + g
    if cache_format == "indexer_mxfp4_tiles":  # [tiles, 2, tile, s / 2]
        scales = page_tokens * d + (i // tile) * (tile * s) + (g % 2) * (tile * s // 2)
        scales = scales + (i % tile) * (s // 2) + g // 2
    return ((torch.cat((data, scales), 1), torch.cat((b, d + g))),)


def store(
    caches: Sequence[torch.Tensor],
    slots: torch.Tensor,
    spec: RecordSpec,
    data: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Write records to their slots; slots < 0 store nothing.

    Args:
        caches: the tensors that the format has, [pages, page bytes] uint8 each.
    """
    records = torch.cat((data, scales), 1)
    where = places(spec)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, i = slot // spec.page_tokens, slot % spec.page_tokens
        for cache, (offsets, columns) in zip(caches, where, strict=True):
            at, taken = offsets[i].to(cache.device), columns.to(cache.device)
            cache[page, at] = records[row, taken]


def load(
    caches: Sequence[torch.Tensor], slots: torch.Tensor, spec: RecordSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """The (data, scales) bytes in ``slots``, the inverse of ``store``."""
    record, device = spec.record, caches[0].device
    records = torch.zeros(len(slots), record.record_bytes, dtype=torch.uint8, device=device)
    where = places(spec)
    for row, slot in enumerate(slots.tolist()):
        page, i = slot // spec.page_tokens, slot % spec.page_tokens
        for cache, (offsets, columns) in zip(caches, where, strict=True):
            records[row, columns.to(device)] = cache[page, offsets[i].to(device)]
    return records[:, : record.data_bytes], records[:, record.data_bytes :]
