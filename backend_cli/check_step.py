"""What ``kda-dsv4 check`` asks of a decode path's one-launch operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from backend_cli.check_kda import ALLOWED, HARD_HEADS, Call, make_call, only, relative_error
from backend_core.tables.schema import KernelPath
from backend_core.target import Target
from kda_backend import kda_decode_step, kda_verify_step

_EPS = 1e-5
_DRAFT = 3
Answer = tuple[float, float]


def cases(path: KernelPath) -> dict[str, Callable[[Target, torch.device], Answer]]:
    """The calls that a decode path must get right, by name; each returns (error, allowed)."""
    return {
        "one launch": lambda target, device: run_step(path, target, device, whole_layer=False),
        "one launch, convolution, norm": lambda target, device: run_step(
            path, target, device, whole_layer=True
        ),
        "one launch, convolution, norm, bounded gate": lambda target, device: run_step(
            path, target, device, whole_layer=True, lower_bound=-5.0
        ),
        f"drafts of {_DRAFT}": lambda target, device: run_draft(path, target, device),
    }


def run_step(
    path: KernelPath,
    target: Target,
    device: torch.device,
    *,
    whole_layer: bool,
    lower_bound: float | None = None,
) -> Answer:
    """``kda_decode_step`` for five rows, the last of them padded.

    Args:
        whole_layer: with the short convolution before and the gated norm behind.
        lower_bound: of the gate, or ``None``.
    """
    call = make_call((1,) * 5, 8, 8, regimes=HARD_HEADS, lower_bound=lower_bound, padded=4)
    rng = torch.Generator().manual_seed(3)
    slots, pool = _slots(call), _pool(call)
    before = pool.clone()
    channels = sum(x[0].numel() for x in (call.q, call.k, call.v))
    window = torch.randn(len(pool), 3, channels, generator=rng).to(call.q.dtype)
    weight = 0.5 * torch.randn(channels, 4, generator=rng)
    norm_weight = 0.5 + torch.rand(128, generator=rng)
    norm_gate = torch.randn(call.v.shape, generator=rng).to(call.q.dtype)
    layer: dict[str, Any] = {}
    if whole_layer:
        layer = {
            "conv_state": window.to(device, copy=True).transpose(1, 2),
            "conv_weight": weight.to(device),
            "norm_weight": norm_weight.to(device),
            "norm_gate": norm_gate.to(device),
            "norm_eps": _EPS,
        }
    pool = pool.to(device, copy=True)
    o = kda_decode_step(**_arguments(path, target, device, call), state_pool=pool, **layer).cpu()
    live = slots >= 0
    expected = _convolved(call, window, weight, slots) if whole_layer else call
    want_o, want_states = expected.expected()
    if whole_layer:
        mean = want_o.square().mean(-1, keepdim=True)
        want_o = want_o * torch.rsqrt(mean + _EPS) * norm_weight.double()
        want_o = want_o * norm_gate.double().sigmoid()
        shifted = window.clone()
        fresh = torch.cat([x.flatten(1) for x in (call.q, call.k, call.v)], 1)
        own = slots[live].long()
        shifted[own] = torch.cat([window[own, 1:], fresh[live, None]], 1)
        if not torch.equal(layer["conv_state"].transpose(1, 2).cpu(), shifted):
            raise RuntimeError("the convolution's window differs from that of the definition")
    if not bool((o[~live] == 0).all()):
        raise RuntimeError("a padded row's output is not zero")
    after = pool.cpu()
    _expect_untouched(before, after, slots[live].long())
    return _worst((o[live], want_o[live]), (after[slots[live].long()], want_states[live]))


def run_draft(path: KernelPath, target: Target, device: torch.device) -> Answer:
    """``kda_verify_step`` in sglang's form: the pool stays, the state after each token is kept."""
    call = make_call((_DRAFT,) * 5, 8, 8, regimes=HARD_HEADS, padded=4)
    pool = _pool(call)
    kept = torch.full((5, _DRAFT, *pool.shape[1:]), torch.nan).to(device)
    on_device = pool.to(device, copy=True)
    o = kda_verify_step(
        **_arguments(path, target, device, call),
        state_pool=on_device,
        intermediate_states=kept,
        intermediate_indices=torch.arange(5, dtype=torch.int32, device=device),
    ).cpu()
    _expect_untouched(pool, on_device.cpu(), torch.empty(0, dtype=torch.int64))
    want_o, want_states = call.expected()
    live = _DRAFT * 4  # the padded sequence is the last
    return _worst((o[:live], want_o[:live]), (kept[:4, -1].cpu(), want_states[:4]))


def _arguments(
    path: KernelPath, target: Target, device: torch.device, call: Call
) -> dict[str, Any]:
    """What both operators take, but for the pool."""
    tokens = {name: getattr(call, name).to(device) for name in ("q", "k", "v", "g", "beta")}
    return {
        **tokens,
        "state_indices": _slots(call).to(device),
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": call.lower_bound,
        "A_log": call.a_log.to(device),
        "dt_bias": call.dt_bias.flatten().to(device),
        "plan": only(path, target, call.shape()),
    }


def _slots(call: Call) -> torch.Tensor:
    slots = torch.arange(len(call.lengths), 0, -1, dtype=torch.int32)
    if call.padded is not None:
        slots[call.padded] = -1
    return slots


def _pool(call: Call) -> torch.Tensor:
    """Slots in falling order from N to 1, others random: none may be written."""
    rng = torch.Generator().manual_seed(9)
    pool = torch.randn(len(call.lengths) + 2, *call.state.shape[1:], generator=rng)
    slots = _slots(call)
    pool[slots[slots >= 0].long()] = call.state[slots >= 0]
    return pool


def _convolved(call: Call, window: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor) -> Call:
    """The call behind the short convolution, q, k and v in float64."""
    fresh = torch.cat([x.flatten(1) for x in (call.q, call.k, call.v)], 1)
    inputs = torch.cat([window[slots.clamp(min=0).long()], fresh[:, None]], 1).double()
    rows = F.silu(torch.einsum("ntc,ct->nc", inputs, weight.double()))
    shapes = [x.shape for x in (call.q, call.k, call.v)]
    parts = torch.tensor_split(rows, (shapes[0][1:].numel(), 2 * shapes[0][1:].numel()), 1)
    q, k, v = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
    return dataclasses.replace(call, q=q, k=k, v=v)


def _expect_untouched(before: torch.Tensor, after: torch.Tensor, own: torch.Tensor) -> None:
    others = torch.ones(len(before), dtype=torch.bool)
    others[own] = False
    if not torch.equal(before[others], after[others]):
        raise RuntimeError("a state slot outside the call was written")


def _worst(*results: tuple[torch.Tensor, torch.Tensor]) -> Answer:
    """Of output and states, by regime, the error that uses most of its bound."""
    groups = len(HARD_HEADS)
    errors = [
        (relative_error(got[:, i::groups], want[:, i::groups]), bound)
        for (got, want), bound in zip(results, ALLOWED[torch.bfloat16], strict=True)
        for i in range(groups)
    ]
    return max(errors, key=lambda pair: pair[0] / pair[1])
