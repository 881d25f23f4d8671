"""The typed values that public functions take, and of which checked calls are made.

Making one checks only how its parts go together; `contract.sequences` and `contract.step` check
the tensors of a call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from backend_core.contracts import number
from kda_backend.spec import Beta, Gate


class TokenInputs(NamedTuple):
    """The tokens of a call and how they are read; made by `of`.

    Attributes:
        q, k: ``[*, H, K]`` bf16, fp16 or fp32, where ``*`` is ``B, T`` for sequences (K up to 256)
            and ``N`` for a step (K up to 128, heads of a row adjacent). Views of one packed
            projection will do.
        v: ``[*, HV, V]``, q's dtype; ``HV`` a multiple of ``H``, V as large as K may be. On a GPU
            prefill multiplies 16-bit inputs in fp16: there values and states beyond 65,504 in
            magnitude overflow (states that memory has in fp16 count as 65,504), below 6e-5 they
            lose bits and below 3e-8 they count as 0, and so do q and k without normalisation.
        g: ``[*, HV, K]`` bf16, fp16 or fp32, as the gate says.
        beta: ``[*, HV]`` bf16, fp16 or fp32.
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
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        beta_kind: Beta = Beta.SIGMOID,
        l2norm: bool = True,
        scale: float | None = None,
    ) -> TokenInputs:
        """With the options of the models that engines serve; ``scale`` is by default
        ``K ** -0.5``."""
        if scale is None:
            # a K of zero, or no K at all, is refused by the check that follows
            shape = getattr(q, "shape", ())
            scale = (shape[-1] or 1) ** -0.5 if shape else 1.0
        else:
            scale = number("scale", scale)
        return cls(q, k, v, g, beta, beta_kind, l2norm, scale)


class GateSpec(NamedTuple):
    """The forget gate of a layer; made by `of`, or `LOG_DECAY`.

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
        a_log: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        lower_bound: float | None,
    ) -> GateSpec:
        """The decay is ``exp(-exp(A_log) softplus(g + dt_bias))``, or with ``lower_bound``
        ``exp(lower_bound sigmoid(exp(A_log) (g + dt_bias)))``.

        Raises:
            ValueError: ``A_log`` is missing, or ``lower_bound`` is not in ``[-5, 0)``.
        """
        if lower_bound is None:
            if a_log is None:
                raise ValueError("A_log must be given for the gate without lower_bound, got None")
            return cls(Gate.SOFTPLUS, a_log, dt_bias)
        bound = number("lower_bound", lower_bound)
        if not -5.0 <= bound < 0.0:
            raise ValueError(f"lower_bound must be in [-5, 0), got {bound}")
        return cls(Gate.BOUNDED, a_log, dt_bias, bound)


LOG_DECAY = GateSpec(Gate.LOG)
"""g is the natural logarithm of the decay (<= 0)."""


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
            in the states' dtype that these are slots of, -1 for none.
        null_slot: a slot that marks padding too; -1 where there is none.
        final: the call allocates ``write``.
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
    final: bool = False

    @classmethod
    def pool(
        cls,
        pool: torch.Tensor,
        indices: torch.Tensor,
        has_initial: torch.Tensor | None = None,
        *,
        null_slot: int | None = None,
    ) -> StateRef:
        """Slots of a pool, read and written in place; no other slot is touched.

        Args:
            pool: ``[slots, HV, V, K]`` fp32, bf16 or fp16; slots may be further apart than
                ``HV * V * K`` elements. In fp16 a number beyond 65,504 is stored as that with its
                sign.
            indices: ``[N]`` int32; of a draft also ``[N, T]``. A negative one marks a padded row,
                which starts from zero and writes no state, and gets zeros in the output of a step.
                Slots of the other rows must differ.
            has_initial: ``[N]`` bool; where false, a row starts from zero whatever its slot holds.
                Of sequences alone.
            null_slot: a slot that marks a padded row too (vLLM: 0). Of steps alone.
        """
        null = -1 if null_slot is None else int(null_slot)
        return cls(pool, pool, True, indices, has_initial, None, None, None, null)

    @classmethod
    def functional(
        cls, initial: torch.Tensor | None, *, v_first: bool, final: bool = False
    ) -> StateRef:
        """Initial states ``[N, HV, V, K]`` fp32, or ``[N, HV, K, V]`` without ``v_first``; ``None``
        for zeros. With ``final`` the call also gives the states after the sequences."""
        return cls(initial, None, v_first, final=final)

    def with_snapshots(
        self, chunks: torch.Tensor, snapshots: torch.Tensor, indices: torch.Tensor | None = None
    ) -> StateRef:
        """This reference with states inside of the sequences, which a prefill writes.

        Args:
            chunks: ``[N, S]`` int32: the state of sequence n after so many chunks of 64 tokens is
                kept; for -1, or more chunks than the sequence has, nothing is written.
            snapshots: ``[N, S, HV, V, K]`` fp32; with ``indices`` a pool ``[slots, HV, V, K]`` in
                the states' dtype, which may be the states' own.
            indices: ``[N, S]`` int32 slots; -1 writes nothing. Slots must differ, and none may be
                one that another sequence of the call has. If it is the sequence's own slot, the
                sequence's final state remains there.
        """
        return self._replace(snapshot_chunks=chunks, snapshots=snapshots, snapshot_indices=indices)

    @property
    def dtype(self) -> torch.dtype:
        """That of the states in memory; fp32 where there are none."""
        states = self.write if self.read is None else self.read
        return torch.float32 if states is None else states.dtype

    @property
    def num_snapshots(self) -> int:
        """Snapshots of each sequence."""
        return 0 if self.snapshot_chunks is None else self.snapshot_chunks.shape[1]

    @property
    def snapshot_stride(self) -> int | None:
        """Elements from slot to slot of the pool that snapshots go to; ``None`` without one."""
        if self.snapshot_indices is None or self.snapshots is None:
            return None
        return self.snapshots.stride(0)

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
    """The short convolution of the ``C = 2 H K + HV V`` channels of q, k and v, and its SiLU.

    Attributes:
        state: ``[slots, C, W]``, any strides: the last inputs, oldest first in columns 0 to 2;
            shifted in place. A pool laid out ``[slots, W, C]`` (vLLM's SD, sglang's) is passed as
            ``pool.transpose(1, 2)``.
        weight: ``[C, 4]``, the last tap for the new token; bias: ``[C]`` or ``None``.
    """

    state: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None


class NormInputs(NamedTuple):
    """The gated RMSNorm of the output: weight ``[V]``, gate ``[N, HV, V]`` before its sigmoid."""

    weight: torch.Tensor
    gate: torch.Tensor
    eps: float


class Records(NamedTuple):
    """The records of drafted tokens, from which `kda_verify_step` and `kda_commit_` make the state
    after any of them; of L layers each tensor has one more dimension in front.

    With k as it came into its norm, token t changes a head's state into ``S diag(decay_t) +
    correction_t k_t^T``.

    Attributes:
        correction: ``[rows, HV, T, V]`` fp32: ``beta (v - S k / |k|) / |k|``, where |k| is 1 for a
            model that does not normalise its keys.
        key_gate: ``[rows, HV, T, 2 K]``, q's dtype: k, behind the convolution, then g as it came.
        by_norm: false for the records of vLLM's own commit, whose correction is not divided by the
            last |k|; nothing here folds them.
    """

    correction: torch.Tensor
    key_gate: torch.Tensor
    by_norm: bool = True

    @classmethod
    def empty(
        cls,
        rows: tuple[int, ...],
        max_tokens: int,
        *,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Records:
        """Memory for drafts of up to ``max_tokens`` tokens of ``heads`` value heads; ``rows`` is
        ``(rows,)``, or ``(layers, rows)``."""
        lead = (*rows, heads, max_tokens)
        correction = torch.empty(*lead, value_dim, dtype=torch.float32, device=device)
        return cls(correction, torch.empty(*lead, 2 * key_dim, dtype=dtype, device=device))

    def of_layer(self, layer: int) -> Records:
        """Records of one of L layers."""
        return Records(self.correction[layer], self.key_gate[layer], self.by_norm)


class DraftInputs(NamedTuple):
    """The drafts of ``N`` sequences, and what is kept of them; made by `in_pool`, `in_buffers` or
    `in_records`.

    Attributes:
        cu_seqlens: ``[N + 1]`` int32 or int64 token offsets, or ``None`` for equally long drafts.
            A sequence has at most ``T`` tokens; later ones are not computed. Values in host memory
            are checked; values on a GPU are trusted.
        num_accepted: ``[N]`` int32, or ``None`` where every sequence reads its first slot.
        states: ``[rows, T, HV, V, K]``, or ``None`` for the pool.
        indices: ``[N]`` int32 rows of the buffers, negative for none.
        windows: ``[rows, T, C, 3]``, any strides; tokens after one another may share their inputs.
        correction, key_gate, by_norm: of `Records`, which are kept in place of states, or ``None``.
    """

    cu_seqlens: torch.Tensor | None
    num_accepted: torch.Tensor | None
    states: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    windows: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    key_gate: torch.Tensor | None = None
    by_norm: bool = True

    @classmethod
    def in_pool(
        cls, num_accepted: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> DraftInputs:
        """A slot of the pool for each token (vLLM): the state's indices are ``[N, T]``.

        The state is read from slot ``[n, num_accepted[n] - 1]``, what the previous draft left
        there, and the state after token t goes to slot ``[n, t]``, unless that is negative or null.
        The window is read from column ``num_accepted[n] - 1`` on of the convolution's state at slot
        ``[n, 0]``, whose columns (at least ``T + 2``) become the last two inputs before the draft,
        then the draft. ``num_accepted`` outside of 1 to T is clamped.
        """
        return cls(cu_seqlens, num_accepted)

    @classmethod
    def in_buffers(
        cls,
        states: torch.Tensor,
        indices: torch.Tensor,
        windows: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> DraftInputs:
        """Buffers with a step for each token (sglang): the pools are only read.

        The state after token t of sequence n goes to ``states[indices[n], t]``, in any dtype of a
        pool, the convolution's window to ``windows[indices[n], t]``.
        """
        return cls(cu_seqlens, None, states, indices, windows)

    @classmethod
    def in_records(
        cls,
        records: Records,
        indices: torch.Tensor,
        num_accepted: torch.Tensor | None = None,
        windows: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> DraftInputs:
        """A record for each token in place of a state.

        Row ``indices[n]`` of ``records`` holds the draft before, of which ``num_accepted[n]``
        tokens, 0 to T and no more than it had, were accepted and are not in the state yet. The
        state in the pool is brought up to date by them and stored, and the records of this draft
        replace them. Without ``num_accepted`` nothing is held (``kda_commit_`` has done it), and
        the state is only read.

        With ``windows`` the convolution's window after token t goes to ``windows[indices[n], t]``,
        and its pool is only read, at column 0. Without, it rolls as that of `in_pool`: it is read
        from column ``max(num_accepted[n] - 1, 0)`` on, so 0 says that it lies at column 0 and not
        that a whole draft was rejected. A negative row holds and keeps nothing. ``num_accepted``
        outside of 0 to T is clamped.
        """
        return cls(cu_seqlens, num_accepted, None, indices, windows, *records)
