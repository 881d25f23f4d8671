"""The checked calls that paths take, and what a path is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from backend_core.ready import Prepared
from kda_backend.contract.values import (
    ConvInputs,
    DraftInputs,
    GateSpec,
    NormInputs,
    Records,
    StateRef,
    TokenInputs,
)

if TYPE_CHECKING:
    from kda_backend.layer_checkpoints import Checkpoints
    from kda_backend.scratch import Scratch
    from kda_backend.step_plan import StepPlan


class DraftShape(NamedTuple):
    """``N``, and the most tokens that the draft of a sequence can have."""

    num_sequences: int
    max_tokens: int


class LayerStages(NamedTuple):
    """The stages of a layer around its delta rule, and their tensors.

    Attributes:
        qkv: ``[T, 3 H D]`` from before the convolution, of which the call's q, k and v are views.
        out: ``[T, H, D]``, the call's output.
        conv: of all channels; norm: of the output.
        checkpoints: states inside of the sequences, or ``None``.
    """

    qkv: torch.Tensor
    out: torch.Tensor
    conv: ConvInputs
    norm: NormInputs
    checkpoints: Checkpoints | None


class PrefillCall(NamedTuple):
    """A checked call of a prefill's path.

    Attributes:
        tokens: packed.
        out: ``[1, T, HV, V]``, written.
        chunk_states: ``[chunks, HV, V, K]``, laid out like ``state``: receives the state before
            each chunk; or ``None``.
        scratch: memory for the path.
        layout: stands for calls that are laid out alike, of any plan.
        stages: of a layer. A path that is given them makes the convolution of q and k, which are
            from before it; others get ``None``.
    """

    tokens: TokenInputs
    gate: GateSpec
    step_plan: StepPlan
    state: StateRef
    out: torch.Tensor
    chunk_states: torch.Tensor | None
    scratch: Scratch
    layout: Prepared
    stages: LayerStages | None = None


Addresses = Sequence[int]
PrefillAddresses = tuple[Addresses, Addresses, Addresses]
"""Where the tensors of a prefill lie, 0 for one that is not there: q, k and v, which in a layer are
one, g, beta, output; `arguments_sm90.state_addresses`; of a layer windows, taps, and the norm's
gate and weight."""
PreparedPrefill = Callable[[Addresses, GateSpec, Addresses, "Scratch", Addresses], None]
"""The launches of a prefill's path for calls of one step plan that are laid out alike. It takes the
first two of `PrefillAddresses`, with q, k and v apart; the gate; scratch memory; and the addresses
of windows and taps where the path makes the convolution, else none."""


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


class LayersApart(NamedTuple):
    """Pools and records of L layers that lie anywhere in memory, laid out alike.

    Attributes:
        pools, records: of each layer, ``[slots, HV, V, K]``.
        offsets: ``[3, L]`` int64, on their device: where pools, corrections and keys with gates
            begin, in units of 16 bytes from those of the first layer.
    """

    pools: tuple[torch.Tensor, ...]
    records: tuple[Records, ...]
    offsets: torch.Tensor

    @classmethod
    def of(cls, pools: tuple[torch.Tensor, ...], records: tuple[Records, ...]) -> LayersApart:
        """The layers of a model; it reads their addresses alone.

        Raises:
            ValueError: layers differ in layout, or one does not begin at a multiple of 16 bytes.
        """
        kinds = {
            "states": pools,
            "corrections": tuple(own.correction for own in records),
            "keys with gates": tuple(own.key_gate for own in records),
        }
        offsets = []
        for name, tensors in kinds.items():
            layouts = {(x.dtype, x.shape, x.stride(), x.device) for x in tensors}
            if len(layouts) != 1:
                raise ValueError(f"{name} of all layers must be laid out alike, got {layouts}")
            addresses = [x.data_ptr() for x in tensors]
            if any(address % 16 for address in addresses):
                raise ValueError(f"{name} must begin at multiples of 16 bytes, got {addresses}")
            offsets.append([(address - addresses[0]) // 16 for address in addresses])
        table = torch.tensor(offsets, dtype=torch.int64, device=pools[0].device)
        return cls(pools, records, table)


class CommitCall(NamedTuple):
    """A checked fold of records into states.

    Attributes:
        gate, states, records: of L layers: ``a_log [L, HV]``, ``dt_bias [L, HV * K]``,
            ``[L, slots, HV, V, K]``; where ``apart`` has the layers, states and records of the
            first alone.
        indices, slots, num_accepted, kept_slots, kept_counts, null_slot: as `kda_commit_` takes
            them.
        written_slots: ``[N]`` int32, where states go; ``None`` for the slots that they come from. A
            padded one is left as a padded slot is.
    """

    gate: GateSpec
    states: torch.Tensor
    records: Records
    indices: torch.Tensor
    slots: torch.Tensor
    num_accepted: torch.Tensor
    kept_slots: torch.Tensor | None
    kept_counts: torch.Tensor | None
    null_slot: int
    written_slots: torch.Tensor | None = None
    apart: LayersApart | None = None


class RecordsPath(Protocol):
    """A path of the verification from records, bound to a layer."""

    def prepare(self, call: VerifyCall, /) -> Callable[[VerifyCall], None]:
        """Prepare as a `StepPath` does."""

    def commit(self, call: CommitCall, /) -> None:
        """Bring states up to date."""


class StepPath(Protocol):
    """A path of the decode step or the verification, bound to a layer."""

    def prepare(self, call: Any, /) -> Callable[[Any], None]:
        """Make a function that runs calls laid out as this one; it keeps no tensor of it."""


class InTorch:
    """A path in torch, which prepares nothing."""

    def __init__(self, run: Callable[[Any], None]) -> None:
        self._run = run

    def prepare(self, call: object) -> Callable[[Any], None]:
        return self._run
