"""The contract of a call's tokens and gate, whatever the operator."""

from __future__ import annotations

import itertools

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape
from kda_backend.contract.values import GateSpec, TokenInputs
from kda_backend.selection import KdaSelection, KdaShape, selection_of_call
from kda_backend.spec import Gate

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def refuse_gradients(*values: tuple[object, ...] | None) -> None:
    """Raise ``ValueError`` where torch would record the call: a tensor of ``values``, which are
    the typed values of a call, requires a gradient."""
    if not torch.is_grad_enabled():
        return
    for x in itertools.chain.from_iterable(value or () for value in values):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise ValueError("kda_backend has no backward pass: call it under torch.no_grad()")


def check_tokens(tokens: TokenInputs, gate: GateSpec, rows: tuple[str, ...], max_dim: int) -> None:
    """Shapes, dtypes and devices of tokens and gate parameters.

    Args:
        rows: names of the dimensions before the heads: ``("B", "T")`` or ``("N",)``.
        max_dim: the largest K and V.
    """
    q, k, v, g, beta = tokens[:5]
    rank = len(rows)
    if q.dim() != rank + 2:
        raise ValueError(f"q must have shape [{', '.join(rows)}, H, K], got {list(q.shape)}")
    *lead, heads, key_dim = q.shape
    if v.dim() != rank + 2:
        expected = ", ".join(map(str, lead))
        raise ValueError(f"v must have shape [{expected}, HV, V], got {list(v.shape)}")
    value_heads, value_dim = v.shape[rank:]
    expect_dtype("q", q, *FLOATS)
    expect_shape("k", k, (*lead, heads, key_dim))
    expect_shape("v", v, (*lead, value_heads, value_dim))
    expect_shape("g", g, (*lead, value_heads, key_dim))
    expect_shape("beta", beta, (*lead, value_heads))
    expect_dtype("k", k, q.dtype)
    expect_dtype("v", v, q.dtype)
    expect_dtype("g", g, *FLOATS)
    expect_dtype("beta", beta, *FLOATS)
    if heads == 0 or value_heads == 0 or value_heads % heads:
        raise ValueError(
            f"v must have a multiple of q's {heads} heads (grouped values), got {value_heads}"
        )
    if not 0 < key_dim <= max_dim or not 0 < value_dim <= max_dim:
        raise ValueError(
            f"head dimensions must be 1 to {max_dim}, got K = {key_dim} and V = {value_dim}"
        )
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        expect_device(name, x, q.device)
    _check_gate_parameter("A_log", gate.a_log, value_heads, q.device)
    _check_gate_parameter("dt_bias", gate.dt_bias, value_heads * key_dim, q.device)


def selection_for_tokens(
    tokens: TokenInputs, gate: GateSpec, selection: KdaSelection | None
) -> KdaSelection:
    """The selection of a call, which must be for such tokens, or the device's own for ``None``."""
    q, v = tokens.q, tokens.v
    heads, key_dim = q.shape[-2:]
    value_heads, value_dim = v.shape[-2:]
    bounded = gate.kind == Gate.BOUNDED
    shape = KdaShape(heads, value_heads, key_dim, value_dim, bounded, q.dtype, tokens.g.dtype)
    return selection_of_call(selection, q.device, shape)


def expect_contiguous(name: str, x: torch.Tensor) -> None:
    """Require ``x`` to be contiguous."""
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(x.stride())}")


def _check_gate_parameter(
    name: str, parameter: torch.Tensor | None, size: int, device: torch.device
) -> None:
    """Engines pass A_log as [HV] or [1, 1, HV, 1] and dt_bias as [HV * K] or [HV, K]."""
    if parameter is None:
        return
    if parameter.numel() != size:
        raise ValueError(f"{name} must have {size} elements, got {list(parameter.shape)}")
    expect_dtype(name, parameter, *FLOATS)
    expect_device(name, parameter, device)
    expect_contiguous(name, parameter)
