"""The fold of drafts' records into states in float16, in vLLM's commit, whose own fold does not cut
off what lies beyond their range."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from backend_core.engines.in_place import in_place_of
from kda_backend.contract.calls import CommitCall, LayersApart
from kda_backend.contract.values import GateSpec, Records
from kda_backend.selection import KdaSelection

_FOLD = "kda_dsv4_fold"  # on upstream's context


class Fold:
    """The fold of records of layers whose blocks and records lie apart, by this package's kernel.

    Args:
        selection: of the layers.
        layers: with the attributes that upstream's commit reads.
    """

    def __init__(self, selection: KdaSelection, layers: list[Any]) -> None:
        kept = [layer.recoverssm_records for layer in layers]
        self._paths, self._lower_bound = selection.verify_records, kept[0].lower_bound
        self._layers = LayersApart.of(
            tuple(layer.kv_cache[1] for layer in layers),
            tuple(Records(own.correction, own.key_gate) for own in kept),
        )
        self._states = _as_one_layer(self._layers.pools[0])
        first = self._layers.records[0]
        self._records = Records(_as_one_layer(first.correction), _as_one_layer(first.key_gate))
        rows = len(kept[0].correction)
        self._rows = torch.arange(rows, dtype=torch.int32, device=kept[0].correction.device)

    def __call__(
        self,
        gates: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        num_accepted: torch.Tensor,
        written_slots: torch.Tensor,
        kept: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Bring the states of ``slots [N]`` up to date by the first rows of the records.

        Args:
            gates: A_log ``[L, HV]`` and dt_bias ``[L, HV, K]`` of all layers.
            written_slots, kept: as in `CommitCall`.
        """
        a_log, dt_bias = gates
        call = CommitCall(
            GateSpec.of(a_log, dt_bias.flatten(1), self._lower_bound),
            self._states,
            self._records,
            self._rows[: len(slots)],
            slots,
            num_accepted,
            *kept,
            NULL_BLOCK_ID,
            written_slots,
            self._layers,
        )
        self._paths.run(len(slots) * self._states.shape[2]).commit(call)


def _as_one_layer(x: torch.Tensor) -> torch.Tensor:
    """x with a dimension of layers, whose stride is the same for every number of slots: by its size
    Triton compiles another variant."""
    return x.as_strided((1, *x.shape), (0, *x.stride()))


def compile_fold(module: Any, selection: KdaSelection, pools: tuple[torch.Tensor, ...]) -> None:
    """Compile what a `Fold` launches with a selection for a layer's records and such pools, on a
    padded request alone."""
    layer = SimpleNamespace(kv_cache=pools, recoverssm_records=module.recoverssm_records)
    none = torch.full((1,), -1, dtype=torch.int32, device=pools[1].device)
    gates = (module.A_log.data.view(1, -1), module.dt_bias.data.view(1, -1))
    Fold(selection, [layer])(gates, none, none, none, (none, none))


def install(context: Any, selection: KdaSelection, layers: list[Any]) -> None:
    """Let upstream's ``KDARecoverSSMCommitContext`` of these layers, which is made for its kernels
    for SM10x, use a `Fold` in their place: by then it has a plan, and windows are compacted."""
    setattr(context, _FOLD, Fold(selection, layers))
    _use_folds()


def _use_folds() -> None:
    """Let upstream's commit use the `Fold` of a context that has one; a second call changes
    nothing."""
    from vllm.models.kimi_k3.nvidia.ops import recoverssm

    upstream = recoverssm.cute_recoverssm_commit

    @in_place_of(recoverssm, "cute_recoverssm_commit")
    def fold(context: Any, state_indices: torch.Tensor, batch: int, align: bool) -> None:
        ours = getattr(context, _FOLD, None)
        if ours is None:
            upstream(context, state_indices, batch, align)
            return
        kept = (context.boundary_state_indices[:batch], context.boundary_recovery_lens[:batch])
        ours(
            (context.A_log, context.dt_bias),
            state_indices[:batch].contiguous(),
            context.commit_lens[:batch],
            context.final_state_indices[:batch],
            kept,
        )
