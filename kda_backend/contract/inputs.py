"""The contract of KDA's operators, stated once. Below this module shapes are facts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride

MAX_HEAD_DIM = 256
GATE_LOG, GATE_SOFTPLUS, GATE_BOUNDED = 0, 1, 2
BETA_GIVEN, BETA_SIGMOID, BETA_TWICE_SIGMOID = 0, 1, 2
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class TokenKinds(NamedTuple):
    """What ``check_inputs`` finds out beside that the inputs are right.

    Attributes:
        gate, beta_kind: the ``GATE_*`` and ``BETA_*`` codes of this module.
        packed: q, k, v, g and beta are read as they are, not as packed copies.
    """

    gate: int
    lower_bound: float
    beta_kind: int
    l2norm: bool
    scale: float
    packed: bool


class KdaInputs(NamedTuple):
    """Validated token inputs; ``T`` counts the packed tokens of all ``B`` rows.

    Attributes:
        q, k: ``[B, T/B, H, K]``; v: ``[B, T/B, HV, V]``; g: ``[B, T/B, HV, K]``;
            beta: ``[B, T/B, HV]``. A token's stride is ``stride(1)``, also across rows.
        a_log: ``HV`` elements or ``None``; dt_bias: ``HV * K`` elements or ``None``.
        gate, beta_kind: the ``GATE_*`` and ``BETA_*`` codes of this module.
        scale: factor of the output.
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


class StateInputs(NamedTuple):
    """Where the recurrent state is read and written.

    Attributes:
        read, write: ``[rows, HV, V, K]`` or ``[rows, HV, K, V]``; the same tensor for a pool.
        v_dim, k_dim: which dimension of them is V and which is K.
        indices: ``[N]`` int32 row of each sequence, -1 for none; ``None`` for row n.
        has_initial: ``[N]`` bool; ``None`` where every sequence reads.
        snapshot_chunks: ``[N, S]`` int32, snapshots: ``[N, S, HV, V, K]`` fp32.
    """

    read: torch.Tensor | None
    write: torch.Tensor | None
    v_dim: int
    k_dim: int
    indices: torch.Tensor | None = None
    has_initial: torch.Tensor | None = None
    snapshot_chunks: torch.Tensor | None = None
    snapshots: torch.Tensor | None = None

    def strides(self, tensor: torch.Tensor | None) -> tuple[int, int, int, int]:
        """(row, head, V, K) strides of a tensor laid out like these; zeros where there is none."""
        if tensor is None:
            return (0, 0, 0, 0)
        stride = tensor.stride()
        return (stride[0], stride[1], stride[self.v_dim], stride[self.k_dim])


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    use_gate: bool,
    lower_bound: float | None,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    l2norm: bool,
    wants_grad: bool,
) -> TokenKinds:
    """Check every token input; raise ``ValueError`` before anything is written."""
    if q.dim() != 4:
        raise ValueError(f"q must have shape [B, T, H, K], got {list(q.shape)}")
    batch, length, heads, key_dim = q.shape
    if v.dim() != 4:
        raise ValueError(f"v must have shape [{batch}, {length}, HV, V], got {list(v.shape)}")
    value_heads, value_dim = v.shape[2:]
    device = q.device
    expect_dtype("q", q, *FLOATS)
    expect_shape("k", k, (batch, length, heads, key_dim))
    expect_shape("v", v, (batch, length, value_heads, value_dim))
    expect_shape("g", g, (batch, length, value_heads, key_dim))
    expect_shape("beta", beta, (batch, length, value_heads))
    expect_dtype("k", k, q.dtype)
    expect_dtype("v", v, q.dtype)
    expect_dtype("g", g, *FLOATS)
    expect_dtype("beta", beta, *FLOATS)
    if heads == 0 or value_heads == 0 or value_heads % heads:
        raise ValueError(
            f"v must have a multiple of q's {heads} heads (grouped values), got {value_heads}"
        )
    if not 0 < key_dim <= MAX_HEAD_DIM or not 0 < value_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head dimensions must be 1 to {MAX_HEAD_DIM}, got K = {key_dim} and V = {value_dim}"
        )
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        expect_device(name, x, device)
    if wants_grad:
        raise ValueError("kda_backend has no backward pass: call it under torch.no_grad()")

    if not use_gate:
        gate, lower_bound, a_log, dt_bias = GATE_LOG, None, None, None
    elif lower_bound is None:
        gate = GATE_SOFTPLUS
        if a_log is None:
            raise ValueError("A_log must be given for the gate without lower_bound, got None")
    else:
        gate = GATE_BOUNDED
        if not -5.0 <= lower_bound < 0.0:
            raise ValueError(f"lower_bound must be in [-5, 0), got {lower_bound}")
    check_gate_parameter("A_log", a_log, value_heads, device)
    check_gate_parameter("dt_bias", dt_bias, value_heads * key_dim, device)
    if allow_neg_eigval and not use_beta_sigmoid:
        raise ValueError("allow_neg_eigval=True requires use_beta_sigmoid_in_kernel=True")
    beta_kind = BETA_GIVEN
    if use_beta_sigmoid:
        beta_kind = BETA_TWICE_SIGMOID if allow_neg_eigval else BETA_SIGMOID

    return TokenKinds(
        gate,
        0.0 if lower_bound is None else lower_bound,
        beta_kind,
        l2norm,
        key_dim**-0.5 if scale is None else scale,
        all(map(_is_packed, (q, k, v, g, beta.unsqueeze(3)))),
    )


def wants_grad(*tensors: torch.Tensor) -> bool:
    """Whether torch would record a call on these."""
    return torch.is_grad_enabled() and any([x.requires_grad for x in tensors])


def token_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    kinds: TokenKinds,
) -> KdaInputs:
    """The inputs that were checked, packed where they are not."""
    gate, lower_bound, beta_kind, l2norm, scale, packed = kinds
    if not packed:
        q, k, v, g = (x if _is_packed(x) else x.contiguous() for x in (q, k, v, g))
        beta = beta if _is_packed(beta.unsqueeze(3)) else beta.contiguous()
    if gate == GATE_LOG:
        a_log = dt_bias = None
    return KdaInputs(q, k, v, g, beta, a_log, dt_bias, gate, lower_bound, beta_kind, l2norm, scale)


def check_output(out: torch.Tensor, v: torch.Tensor) -> None:
    """``out`` must be shaped as v, with v's dtype, and packed like the inputs. It may alias v."""
    expect_shape("out", out, tuple(v.shape))
    expect_dtype("out", out, v.dtype)
    expect_device("out", out, v.device)
    expect_stride("out", out, 3, 1)
    if out.shape[0] > 1:
        expect_stride("out", out, 0, out.shape[1] * out.stride(1))


def check_initial_state(
    initial_state: torch.Tensor,
    q: torch.Tensor,
    v: torch.Tensor,
    num_sequences: int,
    state_v_first: bool,
) -> None:
    """The functional form: a state is read from one tensor and written to a new one."""
    expect_shape("initial_state", initial_state, state_shape(q, v, num_sequences, state_v_first))
    expect_dtype("initial_state", initial_state, torch.float32)
    expect_device("initial_state", initial_state, q.device)


def state_shape(
    q: torch.Tensor, v: torch.Tensor, num_sequences: int, state_v_first: bool
) -> tuple[int, int, int, int]:
    """Of the states of all sequences in the functional form."""
    key_dim, value_dim = q.shape[3], v.shape[3]
    last = (value_dim, key_dim) if state_v_first else (key_dim, value_dim)
    return (num_sequences, v.shape[2], *last)


def check_state_pool(
    state_pool: torch.Tensor,
    state_indices: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    q: torch.Tensor,
    v: torch.Tensor,
    num_sequences: int,
) -> None:
    """The engines' form: slots of a pool ``[slots, HV, V, K]`` are read and written in place."""
    key_dim, value_dim, value_heads = q.shape[3], v.shape[3], v.shape[2]
    expect_shape("state_pool", state_pool, ("slots", value_heads, value_dim, key_dim))
    expect_dtype("state_pool", state_pool, torch.float32, torch.bfloat16)
    expect_device("state_pool", state_pool, q.device)
    expect_stride("state_pool", state_pool, 3, 1)
    expect_stride("state_pool", state_pool, 2, key_dim)
    expect_stride("state_pool", state_pool, 1, value_dim * key_dim)
    if state_pool.shape[0] > 1 and state_pool.stride(0) < value_heads * value_dim * key_dim:
        raise ValueError(
            f"state_pool must have slots at least {value_heads * value_dim * key_dim} elements"
            f" apart, got a stride of {state_pool.stride(0)}"
        )
    if state_indices is None:
        raise ValueError("state_indices must be given with state_pool, got None")
    expect_shape("state_indices", state_indices, (num_sequences,))
    expect_dtype("state_indices", state_indices, torch.int32)
    expect_device("state_indices", state_indices, q.device)
    expect_stride("state_indices", state_indices, 0, 1)
    if has_initial_state is not None:
        expect_shape("has_initial_state", has_initial_state, (num_sequences,))
        expect_dtype("has_initial_state", has_initial_state, torch.bool)
        expect_device("has_initial_state", has_initial_state, q.device)
        expect_stride("has_initial_state", has_initial_state, 0, 1)


def check_slots(state_indices: torch.Tensor, state_pool: torch.Tensor) -> None:
    """Values in host memory are checked; values on a GPU are trusted."""
    if state_indices.is_cpu and state_indices.shape[0]:
        low, high = int(state_indices.min()), int(state_indices.max())
        if low < -1 or high >= state_pool.shape[0]:
            raise ValueError(
                f"state_indices must be -1 or a slot below {state_pool.shape[0]},"
                f" got values from {low} to {high}"
            )


def check_snapshots(
    snapshot_chunks: torch.Tensor,
    snapshots: torch.Tensor,
    q: torch.Tensor,
    v: torch.Tensor,
    num_sequences: int,
) -> None:
    """``snapshots [N, S, HV, V, K]`` fp32 receives the state after ``snapshot_chunks [N, S]``."""
    expect_shape("snapshot_chunks", snapshot_chunks, (num_sequences, "S"))
    expect_dtype("snapshot_chunks", snapshot_chunks, torch.int32)
    expect_device("snapshot_chunks", snapshot_chunks, q.device)
    shape = (*snapshot_chunks.shape, v.shape[2], v.shape[3], q.shape[3])
    expect_shape("snapshots", snapshots, shape)
    expect_dtype("snapshots", snapshots, torch.float32)
    expect_device("snapshots", snapshots, q.device)
    for name, tensor in (("snapshot_chunks", snapshot_chunks), ("snapshots", snapshots)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}")


def check_gate_parameter(
    name: str, parameter: torch.Tensor | None, size: int, device: torch.device
) -> None:
    """Engines pass A_log as [HV] or [1, 1, HV, 1] and dt_bias as [HV * K] or [HV, K]."""
    if parameter is None:
        return
    if parameter.numel() != size:
        raise ValueError(f"{name} must have {size} elements, got {list(parameter.shape)}")
    expect_dtype(name, parameter, *FLOATS)
    expect_device(name, parameter, device)
    if not parameter.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(parameter.stride())}")


def _is_packed(x: torch.Tensor) -> bool:
    """Whether its rows follow one another and channels are adjacent."""
    return (x.stride(3) == 1 or x.shape[3] == 1) and (
        x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    )
