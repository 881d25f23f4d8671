"""The operators that go token by token: their kernel paths by the names of the path tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kda_backend.decode import torch as torch_paths
from kda_backend.decode.recurrent import recurrent
from kda_backend.decode.step import fused_step
from kda_backend.decode.step_sm90 import step_sm90
from kda_backend.decode.verify import fused_verification

if TYPE_CHECKING:
    from torch import Tensor

    from kda_backend.contract.step import DraftShape
    from kda_backend.contract.values import (
        ConvInputs,
        DraftInputs,
        GateSpec,
        Kept,
        NormInputs,
        StateRef,
        TokenInputs,
    )
    from kda_backend.selection import KdaSelection

RECURRENT_PATHS = {"recurrent": recurrent, "torch": torch_paths.recurrent}
STEP_PATHS = {"fused_sm90": step_sm90, "fused": fused_step, "torch": torch_paths.step}
VERIFY_PATHS = {"fused": fused_verification, "torch": torch_paths.verification}


def run_recurrent(
    selection: KdaSelection,
    tokens: TokenInputs,
    gate: GateSpec,
    cu_seqlens: Tensor | None,
    state: StateRef,
    out: Tensor,
) -> None:
    """Run checked sequences on the path for their grid; without ``cu_seqlens`` each row is one."""
    sequences = tokens.q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    path = selection.recurrent.lookup(sequences * tokens.v.shape[2])
    RECURRENT_PATHS[path.name](path, tokens, gate, cu_seqlens, state, out)


def run_step(
    selection: KdaSelection,
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    conv: ConvInputs | None,
    norm: NormInputs | None,
    out: Tensor,
    pdl_prefetch_safe: bool,
    kept: Kept,
) -> None:
    """Run a checked decode step on the path for its grid."""
    path = kept.get(selection)
    if path is None:
        path = selection.decode_step.lookup(tokens.v.shape[0] * tokens.v.shape[1])
        kept[selection] = path
    STEP_PATHS[path.name](path, tokens, gate, state, conv, norm, out, pdl_prefetch_safe, kept)


def run_verification(
    selection: KdaSelection,
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    draft: DraftInputs,
    shape: DraftShape,
    conv: ConvInputs | None,
    norm: NormInputs | None,
    out: Tensor,
) -> None:
    """Run a checked verification on the path for its grid."""
    path = selection.verify.lookup(shape.num_sequences * tokens.v.shape[1])
    VERIFY_PATHS[path.name](path, tokens, gate, state, draft, shape, conv, norm, out)
