"""The calls of ``kda-dsv4 check`` for a layer's prefill, from convolution to checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F

from backend_core.tables.schema import KernelPath
from backend_core.target import Target
from backend_core.testing.numerics import relative_error
from kda_backend import layer, reference
from kda_backend.layer import LayerWeights, Pools, Tokens
from kda_backend.layer_checkpoints import Checkpoints
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaShape, select
from kda_backend.spec import CHUNK
from kda_backend.step_plan import build_step_plan

ALLOWED = 1.5e-2
"""Relative L2: bf16 rounds the convolution's output, the delta rule's and the norm's."""
_HEADS, _DIM, _TAPS, _SLOTS = 2, 128, 4, 6
_LENGTHS, _OWN, _INITIAL = (20, 3, 70), (4, 1, 3), (True, False, True)
_KEPT_OF, _KEPT_AT, _KEPT_IN, _NULL = 2, CHUNK, 0, 5  # sequence, token, slots
_GAP = 64  # elements between the states of two slots, where an engine has a window


@dataclass(frozen=True)
class _Layer:
    """One layer's inputs in bf16, on the CPU."""

    weights: LayerWeights
    qkv: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    gate: torch.Tensor
    conv_pool: torch.Tensor
    state_pool: torch.Tensor


def run(
    path: KernelPath,
    target: Target,
    device: torch.device,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[float, float]:
    """One step of three sequences in an engine's pools, of which one leaves a checkpoint: in fp32
    the scan writes it to the pool, in 16 bits to memory that is then copied.

    Raises:
        RuntimeError: a window of the convolution differs from its tokens, or another slot changed.
    """
    drawn = _drawn(state_dtype)
    conv = drawn.conv_pool.to(device, copy=True)
    size = drawn.state_pool[0].numel()
    memory = torch.full((_SLOTS, size + _GAP), math.nan, dtype=state_dtype, device=device)
    states = torch.unflatten(memory[:, :size], 1, drawn.state_pool.shape[1:])
    states.copy_(drawn.state_pool)
    out = torch.full(drawn.g.shape, math.nan, dtype=torch.bfloat16, device=device)
    bounds = torch.tensor([0, *_LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    offsets, slots = (torch.zeros(len(_LENGTHS), dtype=torch.int32) for _ in range(2))
    slots[:] = _NULL
    offsets[_KEPT_OF], slots[_KEPT_OF] = _KEPT_AT, _KEPT_IN
    w = drawn.weights
    qkv, g, beta, gate = (x.to(device) for x in (drawn.qkv, drawn.g, drawn.beta, drawn.gate))
    layer.prefill(
        replace(
            w,
            conv=w.conv.to(device),
            a_log=w.a_log.to(device),
            dt_bias=w.dt_bias.to(device),
            norm=w.norm.to(device),
        ),
        select(target, KdaShape(_HEADS, _HEADS, _DIM, _DIM)).with_path(path),
        Tokens(qkv, g, beta, gate, out),
        Pools(conv, states),
        torch.tensor(_OWN, dtype=torch.int32, device=device),
        torch.tensor(_INITIAL, device=device),
        build_step_plan(
            bounds.to(device),
            sum(_LENGTHS),
            cu_seqlens_cpu=bounds,
            chunk_table=path.name != "torch",
        ),
        Scratch(device),
        checkpoints=Checkpoints.of(offsets.to(device), slots.to(device), _NULL),
    )
    want, want_conv, want_states = _expected(drawn)
    conv, states = conv.cpu(), states.cpu()
    if not torch.equal(conv.double(), want_conv):
        raise RuntimeError("a window of the convolution is not of its sequence's last tokens")
    written = [*_OWN, _KEPT_IN]
    rest = [slot for slot in range(_SLOTS) if slot not in written]
    between = memory[:, size:].isnan()
    if not (torch.equal(states[rest], drawn.state_pool[rest]) and bool(between.all())):
        raise RuntimeError("a state slot outside the call was written")
    errors = [relative_error(states[slot], want_states[slot]) for slot in written]
    return max(relative_error(out.cpu(), want), *errors), ALLOWED


def _drawn(state_dtype: torch.dtype) -> _Layer:
    rng = torch.Generator().manual_seed(23)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng)

    tokens, channels = sum(_LENGTHS), 3 * _HEADS * _DIM
    weights = LayerWeights(
        conv=0.5 * randn(channels, _TAPS),
        a_log=randn(_HEADS),
        dt_bias=randn(_HEADS * _DIM) - 3.0,
        norm=randn(_DIM).bfloat16(),
        norm_eps=1e-5,
        lower_bound=None,
    )
    wide = randn(tokens, channels + _HEADS + 6).bfloat16()  # a row of the packed projection
    return _Layer(
        weights,
        qkv=wide[:, :channels],
        g=randn(tokens, _HEADS, _DIM).bfloat16(),
        beta=wide[:, channels : channels + _HEADS],
        gate=randn(tokens, _HEADS, _DIM).bfloat16(),
        conv_pool=randn(_SLOTS, _TAPS - 1, channels).bfloat16().transpose(1, 2),
        state_pool=randn(_SLOTS, _HEADS, _DIM, _DIM).to(state_dtype),
    )


def _expected(x: _Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output ``[T, H, D]`` and both pools after the call, sequence by sequence in float64."""
    conv, states = x.conv_pool.double(), x.state_pool.double()
    outputs, begin = [], 0
    for n, (length, slot) in enumerate(zip(_LENGTHS, _OWN, strict=True)):
        window = conv[slot] if _INITIAL[n] else torch.zeros_like(conv[slot])
        state = states[slot] if _INITIAL[n] else torch.zeros_like(states[slot])
        cuts = [0, _KEPT_AT, length] if n == _KEPT_OF else [0, length]
        for first, last in pairwise(cuts):
            part = slice(begin + first, begin + last)
            o, window, state = _sequence(x, part, window, state)
            outputs.append(o)
            if last != length:
                conv[_KEPT_IN], states[_KEPT_IN] = window, state
        conv[slot], states[slot] = window, state
        begin += length
    return torch.cat(outputs), conv, states


def _sequence(
    x: _Layer, part: slice, window: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of one sequence: their output, and the window and the state behind them."""
    w, tokens = x.weights, part.stop - part.start
    line = torch.cat([window, x.qkv[part].double().T], 1)
    mixed = F.conv1d(line[None], w.conv.double()[:, None], groups=line.shape[0])[0]
    q, k, v = F.silu(mixed).T.reshape(tokens, 3, _HEADS, _DIM).unbind(1)
    g = reference.log_decay(x.g[part].double(), w.a_log.double(), w.dt_bias.double(), None)
    o, after = reference.recurrent_kda(
        reference.l2norm(q),
        reference.l2norm(k),
        v,
        g,
        x.beta[part].double().sigmoid(),
        scale=_DIM**-0.5,
        state=state[None],
        cu_seqlens=[0, tokens],
    )
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + w.norm_eps) * w.norm.double()
    return o * x.gate[part].double().sigmoid(), line[:, -(_TAPS - 1) :], after[0]
