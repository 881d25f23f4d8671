"""The contract of the fused decode step, stated once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from backend_core.contracts import (
    expect_device,
    expect_dtype,
    expect_shape,
    expect_stride,
    once,
)
from kda_backend.contract.inputs import (
    BETA_GIVEN,
    BETA_SIGMOID,
    BETA_TWICE_SIGMOID,
    FLOATS,
    GATE_BOUNDED,
    GATE_LOG,
    GATE_SOFTPLUS,
    check_gate_parameter,
    wants_grad,
)
from kda_backend.selection import KdaPlan, KdaShape, plan_of_call

MAX_STEP_DIM = 128  # one program holds the state of a head
TAPS = 4


class ConvInputs(NamedTuple):
    """The short convolution of ``C`` channels: q's, then k's, then v's.

    Attributes:
        state: ``[slots, C, W]``, any strides; weight: ``[C, 4]``; bias: ``[C]`` or ``None``.
    """

    state: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


class NormInputs(NamedTuple):
    """The gated RMSNorm of the output: weight ``[V]``, gate ``[N, HV, V]``."""

    weight: torch.Tensor
    gate: torch.Tensor
    eps: float


class StepInputs(NamedTuple):
    """Validated inputs of ``N`` rows, or of as many tokens.

    Attributes:
        q, k: ``[N, H, K]``; v: ``[N, HV, V]``; g: ``[N, HV, K]``; beta: ``[N, HV]``. Heads of a row
            are adjacent, rows are ``stride(0)`` apart.
        a_log: ``HV`` elements or ``None``; dt_bias: ``HV * K`` elements or ``None``.
        gate, beta_kind: the ``GATE_*`` and ``BETA_*`` codes of ``kda_backend.contract.inputs``.
        pool: ``[slots, HV, V, K]``; indices: int32.
        null_slot: rows at this slot are padding; -1 where there is none.
        settled: no kernel that may still run writes the pools, the indices or the weights.
        plan: the paths that serve such inputs.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    gate: int
    lower_bound: float
    beta_kind: int
    l2norm: bool
    scale: float
    pool: torch.Tensor
    indices: torch.Tensor
    null_slot: int
    conv: ConvInputs | None
    norm: NormInputs | None
    settled: bool
    plan: KdaPlan


def check_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    null_slot: int | None,
    scale: float | None,
    l2norm: bool,
    use_gate: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    conv_state: torch.Tensor | None,
    conv_weight: torch.Tensor | None,
    conv_bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_gate: torch.Tensor | None,
    norm_eps: float,
    out: torch.Tensor | None,
    settled: bool = False,
    plan: KdaPlan | None,
) -> StepInputs:
    """Check all but the shape of ``state_indices``; raise ``ValueError`` before any write.

    Raises:
        ValueError: an input is not as described.
        LookupError: there is no plan for such inputs.
    """
    tensors = _StepTensors(
        q, k, v, g, beta, a_log, dt_bias, state_pool, state_indices, conv_state, conv_weight,
        conv_bias, norm_weight, norm_gate, out,
    )  # fmt: skip
    bound = None if lower_bound is None else float(lower_bound)
    options = _StepOptions(
        use_gate,
        bound,
        use_beta_sigmoid,
        allow_neg_eigval,
        wants_grad(q, k, v, g, beta),
        plan,
    )
    gate, beta_kind, plan = _check_facts(tensors, options)
    check_rows("state_indices", state_indices, "slot", state_pool)
    conv = norm = None
    if conv_state is not None and conv_weight is not None:
        conv = ConvInputs(conv_state, conv_weight, conv_bias)
    if norm_weight is not None and norm_gate is not None:
        norm = NormInputs(norm_weight, norm_gate, float(norm_eps))
    return StepInputs(
        q,
        k,
        v,
        g,
        beta,
        a_log if use_gate else None,
        dt_bias if use_gate else None,
        gate,
        0.0 if bound is None or not use_gate else bound,
        beta_kind,
        l2norm,
        q.shape[2] ** -0.5 if scale is None else float(scale),
        state_pool,
        state_indices,
        -1 if null_slot is None else int(null_slot),
        conv,
        norm,
        settled,
        plan,
    )


class _StepTensors(NamedTuple):
    """The tensors of a step."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    state_pool: torch.Tensor
    state_indices: torch.Tensor
    conv_state: torch.Tensor | None
    conv_weight: torch.Tensor | None
    conv_bias: torch.Tensor | None
    norm_weight: torch.Tensor | None
    norm_gate: torch.Tensor | None
    out: torch.Tensor | None


class _StepOptions(NamedTuple):
    """What is checked with them."""

    use_gate: bool
    lower_bound: float | None
    use_beta_sigmoid: bool
    allow_neg_eigval: bool
    wants_grad: bool
    plan: KdaPlan | None


@once
def _check_facts(tensors: _StepTensors, options: _StepOptions) -> tuple[int, int, KdaPlan]:
    """All but values: (``GATE_*`` code, ``BETA_*`` code, plan)."""
    q, k, v, g, beta, a_log, dt_bias, state_pool, state_indices, *others = tensors
    conv_state, conv_weight, conv_bias, norm_weight, norm_gate, out = others
    use_gate, lower_bound, use_beta_sigmoid, allow_neg_eigval, wants_grad, plan = options
    if q.dim() != 3:
        raise ValueError(f"q must have shape [N, H, K], got {list(q.shape)}")
    rows, heads, key_dim = q.shape
    if v.dim() != 3:
        raise ValueError(f"v must have shape [{rows}, HV, V], got {list(v.shape)}")
    value_heads, value_dim = v.shape[1:]
    device = q.device
    expect_dtype("q", q, *FLOATS)
    expect_shape("k", k, (rows, heads, key_dim))
    expect_shape("v", v, (rows, value_heads, value_dim))
    expect_shape("g", g, (rows, value_heads, key_dim))
    expect_shape("beta", beta, (rows, value_heads))
    expect_dtype("k", k, q.dtype)
    expect_dtype("v", v, q.dtype)
    expect_dtype("g", g, *FLOATS)
    expect_dtype("beta", beta, *FLOATS)
    if heads == 0 or value_heads == 0 or value_heads % heads:
        raise ValueError(
            f"v must have a multiple of q's {heads} heads (grouped values), got {value_heads}"
        )
    if not 0 < key_dim <= MAX_STEP_DIM or not 0 < value_dim <= MAX_STEP_DIM:
        raise ValueError(
            f"head dimensions must be 1 to {MAX_STEP_DIM}, got K = {key_dim} and V = {value_dim}"
        )
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g)):
        expect_device(name, x, device)
        _expect_adjacent_heads(name, x)
    expect_device("beta", beta, device)
    expect_stride("beta", beta, 1, 1)
    if wants_grad:
        raise ValueError("kda_backend has no backward pass: call it under torch.no_grad()")
    gate = GATE_LOG
    if use_gate:
        gate = GATE_SOFTPLUS if lower_bound is None else GATE_BOUNDED
        if lower_bound is None and a_log is None:
            raise ValueError("A_log must be given for the gate without lower_bound, got None")
        if lower_bound is not None and not -5.0 <= lower_bound < 0.0:
            raise ValueError(f"lower_bound must be in [-5, 0), got {lower_bound}")
        check_gate_parameter("A_log", a_log, value_heads, device)
        check_gate_parameter("dt_bias", dt_bias, value_heads * key_dim, device)
    if allow_neg_eigval and not use_beta_sigmoid:
        raise ValueError("allow_neg_eigval=True requires use_beta_sigmoid_in_kernel=True")
    beta_kind = BETA_GIVEN
    if use_beta_sigmoid:
        beta_kind = BETA_TWICE_SIGMOID if allow_neg_eigval else BETA_SIGMOID

    check_states("state_pool", state_pool, ("slots", value_heads, value_dim, key_dim), device)
    expect_dtype("state_indices", state_indices, torch.int32)
    expect_device("state_indices", state_indices, device)
    _check_conv(conv_state, conv_weight, conv_bias, q, v, state_pool.shape[0])
    if out is not None:
        expect_shape("out", out, (rows, value_heads, value_dim))
        expect_dtype("out", out, q.dtype)
        expect_device("out", out, device)
        _expect_adjacent_heads("out", out)
    _check_norm(norm_weight, norm_gate, v)
    bounded = gate == GATE_BOUNDED
    shape = KdaShape(heads, value_heads, key_dim, value_dim, bounded, q.dtype, g.dtype)
    return gate, beta_kind, plan_of_call(plan, device, shape)


def _check_conv(
    state: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    q: torch.Tensor,
    v: torch.Tensor,
    slots: int,
) -> None:
    if state is None or weight is None:
        if state is not None or weight is not None or bias is not None:
            raise ValueError("conv_state and conv_weight must be given together")
        return
    heads, key_dim = q.shape[1:]
    value_heads, value_dim = v.shape[1:]
    if heads != value_heads:
        raise ValueError(
            f"conv_state needs as many value heads as heads, got {value_heads} and {heads}"
        )
    channels = 2 * heads * key_dim + value_heads * value_dim
    expect_shape("conv_state", state, ("slots", channels, "W"))
    if state.shape[2] < TAPS - 1:
        raise ValueError(f"conv_state must have at least 3 columns, got {state.shape[2]}")
    if state.shape[0] < slots:
        raise ValueError(f"conv_state must have state_pool's {slots} slots, got {state.shape[0]}")
    expect_dtype("conv_state", state, *FLOATS)
    expect_device("conv_state", state, q.device)
    expect_shape("conv_weight", weight, (channels, TAPS))
    expect_dtype("conv_weight", weight, *FLOATS)
    expect_device("conv_weight", weight, q.device)
    _expect_contiguous("conv_weight", weight)
    if bias is not None:
        expect_shape("conv_bias", bias, (channels,))
        expect_dtype("conv_bias", bias, *FLOATS)
        expect_device("conv_bias", bias, q.device)
        _expect_contiguous("conv_bias", bias)


def _check_norm(weight: torch.Tensor | None, gate: torch.Tensor | None, v: torch.Tensor) -> None:
    if weight is None or gate is None:
        if weight is not None or gate is not None:
            raise ValueError("norm_weight and norm_gate must be given together")
        return
    expect_shape("norm_weight", weight, (v.shape[2],))
    expect_dtype("norm_weight", weight, *FLOATS)
    expect_device("norm_weight", weight, v.device)
    _expect_contiguous("norm_weight", weight)
    expect_shape("norm_gate", gate, tuple(v.shape))
    expect_dtype("norm_gate", gate, *FLOATS)
    expect_device("norm_gate", gate, v.device)
    _expect_adjacent_heads("norm_gate", gate)


def check_states(
    name: str,
    states: torch.Tensor,
    shape: tuple[int | str, ...],
    device: torch.device | None = None,
) -> None:
    """``[..., HV, V, K]`` whose last three dimensions are packed; no two states overlap."""
    expect_shape(name, states, shape)
    expect_dtype(name, states, torch.float32, torch.bfloat16)
    if device is not None:
        expect_device(name, states, device)
    size = 1
    for dim in range(states.dim() - 1, states.dim() - 4, -1):
        expect_stride(name, states, dim, size)
        size *= states.shape[dim]
    for dim in range(states.dim() - 3):
        if states.shape[dim] > 1 and states.stride(dim) < size:
            raise ValueError(
                f"{name} must have states at least {size} elements apart, got a stride of"
                f" {states.stride(dim)}"
            )


def check_rows(name: str, indices: torch.Tensor, what: str, of: torch.Tensor) -> None:
    """Values in host memory are checked; values on a GPU are trusted."""
    if indices.is_cpu and indices.numel() and int(indices.max()) >= of.shape[0]:
        raise ValueError(
            f"{name} must be negative or a {what} below {of.shape[0]}, got {int(indices.max())}"
        )


def _expect_adjacent_heads(name: str, x: torch.Tensor) -> None:
    expect_stride(name, x, 2, 1)
    expect_stride(name, x, 1, x.shape[2])


def _expect_contiguous(name: str, x: torch.Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(x.stride())}")


def is_aligned(x: StepInputs) -> bool:
    """Whether the pool's states, and the convolution's weight, start at multiples of 16 bytes."""
    if x.pool.data_ptr() % 16 or x.pool.stride(0) * x.pool.element_size() % 16:
        return False
    return x.conv is None or x.conv.weight.data_ptr() % 16 == 0
