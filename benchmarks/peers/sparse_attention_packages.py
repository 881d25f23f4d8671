"""Calls of SageAttention 2, SpargeAttn and FastVideo's kernel, as installed, and their errors.

Their kernels go to the default stream whatever stream is current (ThunderKittens': by release), so
a captured graph would be empty: they are timed by events around a call, on the default stream.
Tensors are [1, H, L, D] views, as for the other peers.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from block_sparse_backend import reference

STA_CANVAS = (18, 48, 80)
STA_FLAG = 3
"""ThunderKittens' canvas in tokens, with tiles of 6 x 8 x 8, and its name for it; of the other two
that its source names one has text tokens always and the other is smaller."""


@dataclass(frozen=True)
class Sage2:
    """SageAttention 2's path for Hopper: INT8 with a scale for each thread, values in e4m3."""

    core: Any

    @classmethod
    def load(cls) -> Sage2:
        """Raises ImportError where it does not load."""
        core = importlib.import_module("sageattention.core")
        if not core.SM90_ENABLED:
            raise ImportError("sageattention was imported without its kernel for sm_90")
        return cls(core)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        """Its public function; causal is aligned to the top left."""
        out: Tensor = self.core.sageattn_qk_int8_pv_fp8_cuda_sm90(
            q, k, v, tensor_layout="HND", is_causal=is_causal, qk_quant_gran="per_thread"
        )
        return out

    def quantise(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """As the public function does, for a number of keys that 128 divides."""
        mean = k.mean(dim=2, keepdim=True)
        ready = self.core.per_thread_int8_triton(
            q, k, mean, tensor_layout="HND", BLKQ=64, WARPQ=16, BLKK=128, WARPK=128
        )
        values, scales, _ = self.core.per_channel_fp8(v, tensor_layout="HND", smooth_v=False)
        return (*ready, values, scales)

    def attend(self, ready: tuple[Tensor, ...], out: Tensor, is_causal: bool) -> None:
        """The kernel alone."""
        q8, q_scale, k8, k_scale, values, v_scale = ready
        layout, per_thread, scale = 1, 3, q8.shape[3] ** -0.5
        self.core.sm90_compile.qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf(
            *(q8, k8, values, out, q_scale, k_scale, v_scale),
            *(layout, int(is_causal), per_thread, scale, 0),
        )


@dataclass(frozen=True)
class Sparge:
    """SpargeAttn's path for Hopper: blocks of 64 queries by 128 keys."""

    core: Any

    @classmethod
    def load(cls) -> Sparge:
        """Raises ImportError where it does not load; it needs einops."""
        return cls(importlib.import_module("spas_sage_attn.core"))

    def over_map(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        """Its public function for a given map, bool [1, H, tiles, blocks]."""
        out: Tensor = self.core.block_sparse_sage2_attn_cuda(q, k, v, mask_id=kept)
        return out

    def predicted(
        self, q: Tensor, k: Tensor, v: Tensor, topk: float, is_causal: bool = False
    ) -> Tensor:
        """Its public function with a prediction."""
        out: Tensor = self.core.spas_sage2_attn_meansim_topk_cuda(
            q, k, v, topk=topk, is_causal=is_causal
        )
        return out

    def ready(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        """The kernel's inputs: quantised tensors and the list of blocks."""
        core = self.core
        mean = k.mean(dim=-2, keepdim=True)
        q8, q_scale, k8, k_scale = core.get_vanilla_qk_quant(q, k, mean, 64, 128)
        lut, count = core.block_map_lut_triton(block_map=kept)
        half = v.contiguous().half()
        b, h, n, d = half.shape
        turned = torch.empty(b, h, d, -(-n // 128) * 128, dtype=half.dtype, device=v.device)
        core.fused.transpose_pad_permute_cuda(half, turned, 1)
        values = torch.empty(turned.shape, dtype=torch.float8_e4m3fn, device=v.device)
        v_scale = torch.empty(b, h, d, device=v.device)
        core.fused.scale_fuse_quant_cuda(turned, values, v_scale, n, 2.25, 1)
        threshold = torch.full((q.shape[1],), 50.0, device=q.device)
        return q8, k8, values, lut, count, threshold, q_scale, k_scale, v_scale

    def attend(self, ready: tuple[Tensor, ...], out: Tensor) -> None:
        """The kernel alone."""
        q8, k8, values, *rest = ready
        name = "qk_int8_sv_f8_accum_f32_block_sparse_attn_inst_buf_fuse_v_scale"
        run = getattr(self.core.qattn, f"{name}_with_pv_threshold_sm90")
        run(q8, k8, values, out, *rest, 1, 0, 1, q8.shape[3] ** -0.5, 0)


@dataclass(frozen=True)
class Sta:
    """FastVideo's ThunderKittens kernel for sliding tiles: a launch for each head."""

    library: Any

    @classmethod
    def load(cls) -> Sta:
        """Raises ImportError where it does not load."""
        return cls(importlib.import_module("fastvideo_kernel._C.fastvideo_kernel_ops"))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int, int]) -> Tensor:
        """Tokens of ``STA_CANVAS`` in the order of its tiles; the copies of each head are counted,
        as FastVideo makes them."""
        out = torch.empty_like(q)
        for head in range(q.shape[1]):
            one = [x[:, head : head + 1].contiguous() for x in (q, k, v)]
            result = torch.empty_like(one[0])
            self.library.sta_fwd(*one, result, *window, 0, False, False, STA_FLAG)
            out[:, head : head + 1] = result
        return out


@dataclass(frozen=True)
class Packages:
    """The peers that loaded, and why the others did not."""

    sage2: Sage2 | None = None
    sparge: Sparge | None = None
    sta: Sta | None = None
    absent: tuple[tuple[str, str], ...] = ()


def load() -> Packages:
    """The peers that are installed."""
    kinds: dict[str, Callable[[], Any]] = {
        "SageAttention2": Sage2.load,
        "SpargeAttn": Sparge.load,
        "ThunderKittens": Sta.load,
    }
    found: dict[str, Any] = dict.fromkeys(kinds)
    absent = []
    for name, kind in kinds.items():
        try:
            found[name] = kind()
        except ImportError as reason:
            absent.append((name, f"does not load: {reason}"))
    return Packages(
        found["SageAttention2"], found["SpargeAttn"], found["ThunderKittens"], tuple(absent)
    )


Calls = dict[str, Callable[[], object]]
"""The timed calls, by their names in a result."""


def beside_dense(built: Packages, x: tuple[Tensor, Tensor, Tensor], is_causal: bool) -> Calls:
    """SageAttention 2: its kernel, its quantisation and its public function."""
    sage2 = built.sage2
    if sage2 is None:
        return {}
    ready, out = sage2.quantise(*x), torch.empty_like(x[0])
    return {
        "SageAttention2": lambda: sage2.whole(*x, is_causal),
        "SageAttention2, kernel alone": lambda: sage2.attend(ready, out, is_causal),
        "SageAttention2, quantisation": lambda: sage2.quantise(*x),
    }


def beside_map(built: Packages, x: tuple[Tensor, Tensor, Tensor], kept: Tensor) -> Calls:
    """SpargeAttn over a map, bool [1, H, tiles, blocks]: its kernel and its public function."""
    sparge = built.sparge
    if sparge is None:
        return {}
    ready = sparge.ready(*x, kept)
    out = torch.empty(x[0].shape, dtype=x[0].dtype, device=x[0].device)
    return {
        "SpargeAttn": lambda: sparge.over_map(*x, kept),
        "SpargeAttn, kernel alone": lambda: sparge.attend(ready, out),
    }


def beside_predicted(built: Packages, x: tuple[Tensor, Tensor, Tensor], topk: float) -> Calls:
    """SpargeAttn's public function with a prediction."""
    sparge = built.sparge
    return {} if sparge is None else {"SpargeAttn": lambda: sparge.predicted(*x, topk)}


def beside_tiles(
    built: Packages, x: tuple[Tensor, Tensor, Tensor], canvas: tuple[int, int, int]
) -> Calls:
    """ThunderKittens' kernel, on the one canvas that it serves here."""
    sta = built.sta
    if sta is None or canvas != STA_CANVAS:
        return {}
    return {"ThunderKittens": lambda: sta(*x, (3, 3, 3))}


def errors(
    built: Packages, make: Callable[..., tuple[Tensor, Tensor, Tensor]], random_map: Tensor
) -> dict[str, float]:
    """Relative errors of output against float64, by what was called.

    Args:
        make: (heads, key heads, tokens) to normal q, k and v.
        random_map: bool [2, 32, 16], for 2,048 tokens.
    """
    found: dict[str, float] = {}
    q, k, v = make(2, 2, 2048)
    scale = q.shape[3] ** -0.5
    below = torch.ones(2048, 2048, dtype=torch.bool, device=q.device).tril()
    every = torch.ones_like(below)

    def add(name: str, call: Callable[[], Tensor], seen: Tensor) -> None:
        want, _ = reference.attention(q, k, v, seen, scale)
        found[name] = _guarded(name, lambda: float((call().double() - want).norm() / want.norm()))

    if (sage2 := built.sage2) is not None:

        def sage2_alone(is_causal: bool) -> Tensor:
            out = torch.full_like(q, torch.nan)
            sage2.attend(sage2.quantise(q, k, v), out, is_causal)
            return out

        add("SageAttention2", lambda: sage2.whole(q, k, v, False), every)
        add("SageAttention2 causal", lambda: sage2.whole(q, k, v, True), below)
        add("SageAttention2, kernel alone", lambda: sage2_alone(False), every)
        add("SageAttention2, kernel alone causal", lambda: sage2_alone(True), below)
    if (sparge := built.sparge) is not None:
        seen = random_map.repeat_interleave(64, 1).repeat_interleave(128, 2)
        kept = random_map[None].contiguous()

        def sparge_alone() -> Tensor:
            out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
            sparge.attend(sparge.ready(q, k, v, kept), out)
            return out

        add("SpargeAttn", lambda: sparge.over_map(q, k, v, kept), seen)
        add("SpargeAttn, kernel alone", sparge_alone, seen)
        name = "SpargeAttn causal, every block"
        add(name, lambda: sparge.predicted(q, k, v, 1.0, True), below)
    if (sta := built.sta) is not None:
        found["ThunderKittens"] = _guarded(
            "ThunderKittens", lambda: _sta_error(sta, *make(1, 1, math.prod(STA_CANVAS)))
        )
    return found


def _guarded(name: str, measure: Callable[[], float]) -> float:
    """The error, NaN where there is none: a peer that fails must not end the others."""
    try:
        error = measure()
    except Exception as reason:
        print(f"{name} failed: {str(reason)[:300]}", flush=True)
        return math.nan
    return error if math.isfinite(error) else math.nan


def trusted(built: Packages, found: dict[str, float]) -> Packages:
    """``built`` without the peers whose public function is wrong, which are not timed."""
    fields = {"SageAttention2": "sage2", "SpargeAttn": "sparge", "ThunderKittens": "sta"}
    wrong = {name: x for name, x in found.items() if name in fields and not x < 0.1}
    said = [
        (name, f"its error against float64 is {error:.2g}, so it is not timed")
        for name, error in wrong.items()
    ]
    absent = (*built.absent, *said)
    return replace(built, absent=absent, **{fields[name]: None for name in wrong})


def _sta_error(sta: Sta, q: Tensor, k: Tensor, v: Tensor) -> float:
    """The first tile and one in the middle, over the 27 tiles that each sees."""
    from block_sparse_backend.plan.sliding_tile import sliding_tile
    from block_sparse_backend.plan.token_order import tile_order

    plan = sliding_tile(tile_order(STA_CANVAS, (6, 8, 8), device=q.device), [(3, 3, 3)], 1)
    got = sta(q, k, v, (3, 3, 3))
    rows, tiles = plan.rows.tolist(), {t: r for _, _, t, r in plan.work.tolist()}
    blocks = plan.cols.tolist()
    worst = 0.0
    for tile in (0, len(tiles) // 2):  # of 128 queries
        begin, _, end, _ = rows[tiles[tile]]
        at = torch.tensor(blocks[begin:end], device=q.device)[:, None] * 128
        keys = (at + torch.arange(128, device=q.device)).flatten()
        mine = slice(128 * tile, 128 * (tile + 1))
        seen = torch.ones(1, dtype=torch.bool, device=q.device)
        want, _ = reference.attention(
            q[:, :, mine], k[:, :, keys], v[:, :, keys], seen, q.shape[3] ** -0.5
        )
        error = float((got[:, :, mine].double() - want).norm() / want.norm())
        worst = max(worst, error) if math.isfinite(error) else math.nan
    return worst
