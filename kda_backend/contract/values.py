"""The typed values that a public operator makes of its arguments on its first lines.

Everything below the operators (checks, pipelines, launches, the engines' layer) takes these. Making
one checks only how arguments go together; `contract.sequences` and `contract.step` check tensors.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kda_backend.spec import Beta, Gate

if TYPE_CHECKING:
    from kda_backend.scratch import Scratch
    from kda_backend.step_plan import StepPlan

Kept = dict[Hashable, Any]
"""The paths' conclusions from strides, dtypes and options of a call, for calls alike: a
check's result has one (`backend_core.contracts.once`). It holds no tensor and no address."""


class TokenInputs(NamedTuple):
    """The tokens of a call and how they are read.

    Attributes:
        q, k: ``[*, H, K]``; v: ``[*, HV, V]``; g: ``[*, HV, K]``; beta: ``[*, HV]``, where ``*`` is
            ``B, T`` for sequences and ``N`` for a decode step.
        beta_kind: how beta becomes a step size.
        l2norm: q and k are normalised over K first.
        scale: factor of the output.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    beta_kind: Beta
    l2norm: bool
    scale: float

    @classmethod
    def of(
        cls,
        tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        scale: float | None,
        l2norm: bool,
        beta_kind: Beta,
    ) -> TokenInputs:
        """From q, k, v, g and beta and the operators' options; ``scale`` is by default
        ``K ** -0.5``."""
        q, k, v, g, beta = tokens
        if scale is None:
            # a K of zero, or no K at all, is refused by the check that follows
            shape = q.shape
            scale = (shape[-1] or 1) ** -0.5 if shape else 1.0
        else:
            scale = float(scale)
        return cls(q, k, v, g, beta, beta_kind, l2norm, scale)


def beta_kind_of(use_beta_sigmoid: bool, allow_neg_eigval: bool) -> Beta:
    """From the operators' flags.

    Raises:
        ValueError: ``allow_neg_eigval`` without ``use_beta_sigmoid``.
    """
    if use_beta_sigmoid:
        return Beta.TWICE_SIGMOID if allow_neg_eigval else Beta.SIGMOID
    if allow_neg_eigval:
        raise ValueError("allow_neg_eigval=True requires use_beta_sigmoid_in_kernel=True")
    return Beta.GIVEN


class GateSpec(NamedTuple):
    """The forget gate of a layer.

    Attributes:
        a_log: ``HV`` elements or ``None``; dt_bias: ``HV * K`` elements or ``None``.
        lower_bound: in ``[-5, 0)`` for a bounded gate, else 0.
    """

    kind: Gate
    a_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    lower_bound: float = 0.0

    @classmethod
    def of(
        cls,
        use_gate: bool,
        a_log: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        lower_bound: float | None,
    ) -> GateSpec:
        """From the operators' arguments, of which a log decay (``use_gate`` false) needs none.

        Raises:
            ValueError: ``A_log`` is missing, or ``lower_bound`` is not in ``[-5, 0)``.
        """
        if not use_gate:
            return _LOG_DECAY
        if lower_bound is None:
            if a_log is None:
                raise ValueError("A_log must be given for the gate without lower_bound, got None")
            return cls(Gate.SOFTPLUS, a_log, dt_bias)
        bound = float(lower_bound)
        if not -5.0 <= bound < 0.0:
            raise ValueError(f"lower_bound must be in [-5, 0), got {bound}")
        return cls(Gate.BOUNDED, a_log, dt_bias, bound)


_LOG_DECAY = GateSpec(Gate.LOG)


class StateRef(NamedTuple):
    """Where the recurrent state is read and written; made by `pool` or `functional`.

    Attributes:
        read, write: ``[rows, HV, V, K]`` or ``[rows, HV, K, V]``; the same tensor for a pool.
        v_first: rows are ``[HV, V, K]``, else ``[HV, K, V]``.
        indices: of a pool, the int32 slot of each sequence, negative for none; else ``None``:
            sequence n has row n.
        has_initial: ``[N]`` bool; ``None`` where every sequence reads its state.
        snapshot_chunks: ``[N, S]`` int32; snapshots: ``[N, S, HV, V, K]`` fp32; or both ``None``.
        snapshot_indices: ``[N, S]`` int32, with which ``snapshots`` is a pool ``[slots, HV, V, K]``
            fp32 that these are slots of, -1 for none.
        null_slot: a slot that marks padding too; -1 where there is none.
    """

    read: torch.Tensor | None
    write: torch.Tensor | None
    v_first: bool
    indices: torch.Tensor | None = None
    has_initial: torch.Tensor | None = None
    snapshot_chunks: torch.Tensor | None = None
    snapshots: torch.Tensor | None = None
    snapshot_indices: torch.Tensor | None = None
    null_slot: int = -1

    @classmethod
    def pool(
        cls,
        pool: torch.Tensor,
        indices: torch.Tensor,
        has_initial: torch.Tensor | None = None,
        *,
        null_slot: int | None = None,
    ) -> StateRef:
        """Slots of ``pool [slots, HV, V, K]``, read and written in place."""
        null = -1 if null_slot is None else int(null_slot)
        return cls(pool, pool, True, indices, has_initial, None, None, None, null)

    @classmethod
    def functional(cls, initial: torch.Tensor | None, *, v_first: bool) -> StateRef:
        """Initial states ``[N, HV, V, K]``, or ``[N, HV, K, V]`` without ``v_first``."""
        return cls(initial, None, v_first)

    @classmethod
    def of(
        cls,
        *,
        functional: tuple[torch.Tensor | None, bool, bool],
        pool: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        snapshots: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (
            None,
            None,
            None,
        ),
    ) -> StateRef:
        """From the operators' arguments; memory for the final state is added by `with_final`.

        Args:
            functional: ``initial_state``, ``output_final_state`` and ``state_v_first``.
            pool: ``state_pool``, ``state_indices`` and ``has_initial_state``.
            snapshots: ``snapshot_chunks``, ``snapshots`` and ``snapshot_indices``.

        Raises:
            ValueError: arguments of both kinds, or half of those of one.
        """
        initial_state, output_final_state, v_first = functional
        state_pool, state_indices, has_initial_state = pool
        if (snapshots[0] is None) != (snapshots[1] is None):
            raise ValueError("snapshot_chunks and snapshots must be given together")
        if snapshots[2] is not None and snapshots[1] is None:
            raise ValueError("snapshot_indices must be given with snapshot_chunks and snapshots")
        if state_pool is None:
            if state_indices is not None or has_initial_state is not None:
                raise ValueError("state_indices and has_initial_state need a state_pool")
            state = cls.functional(initial_state, v_first=v_first)
        elif initial_state is not None or output_final_state:
            raise ValueError(
                "state_pool replaces initial_state and output_final_state: give either"
            )
        elif state_indices is None:
            raise ValueError("state_indices must be given with state_pool, got None")
        else:
            state = cls.pool(state_pool, state_indices, has_initial_state)
        if snapshots[0] is not None:
            state = state.with_snapshots(*snapshots)
        return state

    def with_snapshots(
        self,
        chunks: torch.Tensor | None,
        snapshots: torch.Tensor | None,
        indices: torch.Tensor | None,
    ) -> StateRef:
        """This reference with states inside of the sequences."""
        return self._replace(snapshot_chunks=chunks, snapshots=snapshots, snapshot_indices=indices)

    @property
    def snapshot_stride(self) -> int | None:
        """Elements from slot to slot of the pool that snapshots go to; ``None`` without one."""
        if self.snapshot_indices is None or self.snapshots is None:
            return None
        return self.snapshots.stride(0)

    def with_final(self, tokens: TokenInputs, num_sequences: int) -> StateRef:
        """This reference with new memory for the state after each sequence."""
        shape = self.shape(tokens, num_sequences)
        return self._replace(write=tokens.q.new_empty(shape, dtype=torch.float32))

    def shape(self, tokens: TokenInputs, num_rows: int) -> tuple[int, int, int, int]:
        """The shape of a tensor with the states of ``num_rows`` sequences."""
        key_dim, value_dim = tokens.q.shape[-1], tokens.v.shape[-1]
        last = (value_dim, key_dim) if self.v_first else (key_dim, value_dim)
        return (num_rows, tokens.v.shape[-2], *last)

    def strides(self, tensor: torch.Tensor | None) -> tuple[int, int, int, int]:
        """(row, head, V, K) strides of a tensor laid out like these; zeros where there is none."""
        if tensor is None:
            return (0, 0, 0, 0)
        row, head, v, k = tensor.stride()
        return (row, head, v, k) if self.v_first else (row, head, k, v)


class ConvInputs(NamedTuple):
    """The short convolution of ``C`` channels: q's, then k's, then v's.

    Attributes:
        state: ``[slots, C, W]``, any strides; weight: ``[C, 4]``; bias: ``[C]`` or ``None``.
    """

    state: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        state: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> ConvInputs | None:
        """``None`` where q, k and v are convolved already."""
        if state is not None and weight is not None:
            return cls(state, weight, bias)
        if state is not None or weight is not None or bias is not None:
            raise ValueError("conv_state and conv_weight must be given together")
        return None


class NormInputs(NamedTuple):
    """The gated RMSNorm of the output: weight ``[V]``, gate ``[N, HV, V]`` before its sigmoid."""

    weight: torch.Tensor
    gate: torch.Tensor
    eps: float

    @classmethod
    def of(
        cls, weight: torch.Tensor | None, gate: torch.Tensor | None, eps: float
    ) -> NormInputs | None:
        """``None`` where the output is not normalised."""
        if weight is not None and gate is not None:
            return cls(weight, gate, float(eps))
        if weight is not None or gate is not None:
            raise ValueError("norm_weight and norm_gate must be given together")
        return None


class DraftInputs(NamedTuple):
    """The drafts of ``N`` sequences, and where the states after their tokens go.

    There are two variants: a slot of the pool for each token (``num_accepted`` is given), or
    buffers with a step for each token (``states``, ``indices``, and ``windows`` with a
    convolution).

    Attributes:
        cu_seqlens: ``[N + 1]``, or ``None`` for equally long drafts.
        num_accepted: ``[N]`` int32, or ``None`` where every sequence reads its first slot.
        states: ``[rows, max_tokens, HV, V, K]``, or ``None`` for the pool.
        indices: ``[N]`` int32 rows of the buffers.
        windows: ``[rows, max_tokens, C, 3]``, any strides.
    """

    cu_seqlens: torch.Tensor | None
    num_accepted: torch.Tensor | None
    states: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    windows: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        cu_seqlens: torch.Tensor | None,
        num_accepted_tokens: torch.Tensor | None,
        buffers: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        *,
        has_conv: bool,
    ) -> DraftInputs:
        """From the operator's arguments.

        Args:
            buffers: ``intermediate_states``, ``intermediate_indices`` and ``intermediate_conv``.
            has_conv: the step has a convolution, whose windows are then kept too.

        Raises:
            ValueError: arguments of both variants, or of neither.
        """
        intermediate_states, intermediate_indices, intermediate_conv = buffers
        if intermediate_states is None:
            if intermediate_indices is not None or intermediate_conv is not None:
                raise ValueError(
                    "intermediate_indices and intermediate_conv need intermediate_states, got None"
                )
            if num_accepted_tokens is None:
                raise ValueError(
                    "num_accepted_tokens or intermediate_states must be given: without either there"
                    " is nowhere to keep the states of a draft"
                )
            return cls(cu_seqlens, num_accepted_tokens)
        if num_accepted_tokens is not None:
            raise ValueError(
                "num_accepted_tokens and intermediate_states are two variants: give one"
            )
        if intermediate_indices is None:
            raise ValueError("intermediate_indices must be given with intermediate_states")
        if has_conv != (intermediate_conv is not None):
            raise ValueError("intermediate_conv must be given if and only if conv_state is")
        return cls(cu_seqlens, None, intermediate_states, intermediate_indices, intermediate_conv)


class DraftShape(NamedTuple):
    """``N``, and the most tokens that the draft of a sequence can have."""

    num_sequences: int
    max_tokens: int


class PrefillCall(NamedTuple):
    """A checked call of a prefill's path.

    Attributes:
        tokens: packed.
        out: ``[1, T, HV, V]``, written.
        chunk_states: ``[chunks, HV, V, K]``, laid out like ``state``: receives the state before
            each chunk; or ``None``.
        scratch: memory for the path.
        kept: of the check, or of calls that are laid out alike.
        conv: of q and k, which are from before it, for a path that makes it; else ``None``.
    """

    tokens: TokenInputs
    gate: GateSpec
    step_plan: StepPlan
    state: StateRef
    out: torch.Tensor
    chunk_states: torch.Tensor | None
    scratch: Scratch
    kept: Kept
    conv: ConvInputs | None = None


class RecurrentCall(NamedTuple):
    """A checked call of the recurrence; without ``cu_seqlens`` every row is a sequence."""

    tokens: TokenInputs
    gate: GateSpec
    cu_seqlens: torch.Tensor | None
    state: StateRef
    out: torch.Tensor


class DecodeCall(NamedTuple):
    """A checked decode step; ``pdl_prefetch_safe`` as `kda_decode_step` takes it."""

    tokens: TokenInputs
    gate: GateSpec
    state: StateRef
    conv: ConvInputs | None
    norm: NormInputs | None
    out: torch.Tensor
    pdl_prefetch_safe: bool
    kept: Kept


class VerifyCall(NamedTuple):
    """A checked verification of drafts."""

    tokens: TokenInputs
    gate: GateSpec
    state: StateRef
    draft: DraftInputs
    shape: DraftShape
    conv: ConvInputs | None
    norm: NormInputs | None
    out: torch.Tensor
