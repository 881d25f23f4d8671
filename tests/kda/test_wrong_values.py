"""Typed values that an operator cannot take: each is refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kda_backend import (
    ConvInputs,
    DraftInputs,
    GateSpec,
    NormInputs,
    Records,
    StateRef,
    TokenInputs,
    build_step_plan,
    kda_commit_,
    kda_decode_step,
    kda_prefill,
    kda_recurrent,
    kda_verify_step,
)

N, H, D = 3, 2, 16
CPU = torch.device("cpu")
POOL = torch.zeros(4, H, D, D)
GATE = GateSpec.of(torch.zeros(H), None, None)
RECORDS = Records(torch.zeros(4, H, 2, D), torch.zeros(4, H, 2, 2 * D))
CU_SEQLENS = torch.tensor([0, 1, 1, N])
OUT = torch.zeros(N, H, D)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


ROWS = ints(1, 2, 3)
SNAPSHOTS = (ROWS.view(N, 1), torch.zeros(N, 1, H, D, D))


def tokens(*lead: int, **given: Any) -> TokenInputs:
    lead = lead or (N,)
    inputs = {name: torch.ones(*lead, H, D) for name in "qkvg"} | {"beta": torch.ones(*lead, H)}
    return TokenInputs.of(**(inputs | given))


def slots(**given: Any) -> StateRef:
    return StateRef.pool(POOL, ROWS, **given)


def step(x: TokenInputs | None = None, state: StateRef | None = None, **given: Any) -> object:
    return kda_decode_step(x or tokens(), GATE, state or slots(), **given)


def verify(draft: DraftInputs, state: StateRef | None = None, **given: Any) -> object:
    return kda_verify_step(tokens(), GATE, state or slots(), draft, **given)


def commit(state: StateRef | None = None, counts: Any = ROWS, **given: Any) -> object:
    return kda_commit_(GATE, state or slots(), RECORDS, ROWS, counts, **given)


def prefill(x: TokenInputs | None = None, state: Any = None, *plan: Any, **given: Any) -> object:
    plan = plan or (CU_SEQLENS,)
    return kda_prefill(x or tokens(1, N), GATE, state or slots(), *plan, **given)


def recurrent(state: StateRef, cu_seqlens: Any = CU_SEQLENS) -> object:
    return kda_recurrent(tokens(1, N), GATE, state, cu_seqlens)


def norm(eps: Any) -> NormInputs:
    return NormInputs(torch.ones(D), torch.ones(N, H, D), eps)


KEPT = DraftInputs.in_records(RECORDS, ROWS)
COLD = torch.zeros(N, dtype=torch.bool)
FUNCTIONAL = StateRef.functional(torch.zeros(N, H, D, D), v_first=True)
OVER_ONE_ANOTHER = torch.zeros(1, H, D).expand(N, H, D)
LAYERS = torch.zeros(6, H, D, D).as_strided((2, 4, H, D, D), (H * D * D, H * D * D, D * D, D, 1))
Call = Callable[[], object]
WRONG: dict[str, tuple[Call, str]] = {
    # no tensor
    "a list": (lambda: step(tokens(q=[1.0])), "q must be a torch.Tensor, got list"),
    "a list of tokens": (
        lambda: prefill(tokens(q=[1.0])),
        "q must be a torch.Tensor, got list",
    ),
    "an int": (lambda: step(tokens(v=3)), "v must be a torch.Tensor, got int"),
    "an array": (
        lambda: step(tokens(beta=torch.ones(N, H).numpy())),
        "beta must be a torch.Tensor, got ndarray",
    ),
    "no pool": (
        lambda: step(state=StateRef.pool(None, ROWS)),  # type: ignore[arg-type]
        "state_pool must be a torch.Tensor, got NoneType",
    ),
    "offsets": (lambda: prefill(None, None, [0, 1]), "cu_seqlens must be a torch.Tensor, got list"),
    "counts": (
        lambda: commit(counts=[1, 1, 1]),
        "num_accepted_tokens must be a torch.Tensor, got list",
    ),
    # what the operator does not read
    "cold step": (lambda: step(state=slots(has_initial=COLD)), "has_initial must be None"),
    "cold draft": (lambda: verify(KEPT, slots(has_initial=COLD)), "has_initial must be None"),
    "cold fold": (lambda: commit(slots(has_initial=COLD)), "has_initial must be None"),
    "snapshots of a step": (
        lambda: step(state=slots().with_snapshots(*SNAPSHOTS)),
        "snapshots must be those of a prefill",
    ),
    "snapshots of the recurrence": (
        lambda: recurrent(slots().with_snapshots(*SNAPSHOTS)),
        "snapshots must be those of a prefill",
    ),
    "half of the snapshots": (
        lambda: prefill(None, slots()._replace(snapshots=SNAPSHOTS[1])),
        "snapshots must be given with snapshot_chunks",
    ),
    "null slot": (lambda: prefill(None, slots(null_slot=1)), "null_slot must be None for seq"),
    "null slot of the recurrence": (lambda: recurrent(slots(null_slot=1)), "null_slot must be"),
    "host's offsets alone": (
        lambda: prefill(tokens(N, 1), slots(), None, cu_seqlens_cpu=CU_SEQLENS),
        "cu_seqlens_cpu must be None without cu_seqlens",
    ),
    "host's offsets beside a plan": (
        lambda: prefill(
            None,
            None,
            build_step_plan(CU_SEQLENS, N, chunk_table=False),
            cu_seqlens_cpu=CU_SEQLENS,
        ),
        "cu_seqlens_cpu must be None without cu_seqlens",
    ),
    "slots without counts": (
        lambda: commit(kept=(ints(-1, -1, 0), None)),
        "kept must be a pair of slots and counts, got one",
    ),
    "no counts": (
        lambda: kda_commit_(GATE, slots(), RECORDS, ROWS, None),  # type: ignore[arg-type]
        "num_accepted_tokens must be a torch.Tensor, got NoneType",
    ),
    "no pair": (lambda: commit(kept=ROWS), "kept must be a pair of slots and counts, got 3"),
    "no pool in a step": (lambda: step(state=FUNCTIONAL), "state must be a pool"),
    "no draft": (
        lambda: verify(DraftInputs(None, None)),
        "draft must have accepted tokens, buffers or records",
    ),
    "records without rows": (
        lambda: verify(DraftInputs.in_records(RECORDS, None)),  # type: ignore[arg-type]
        "records must have correction, key_gate and a row",
    ),
    # scalars
    "scale": (lambda: step(tokens(scale=float("nan"))), "scale must be finite, got nan"),
    "beta": (lambda: step(tokens(beta_kind="given")), "beta_kind must be one of Beta, got 'given'"),
    "eps": (lambda: step(norm=norm(float("nan"))), "norm_eps must be finite and not negative"),
    "negative eps": (lambda: step(norm=norm(-1.0)), "norm_eps must be finite and not negative"),
    "no eps": (lambda: step(norm=norm(None)), "norm_eps must be finite and not negative"),
    # memory that is written twice
    "output": (lambda: step(out=OVER_ONE_ANOTHER), "out must have elements that share no memory"),
    "output of drafts": (lambda: verify(KEPT, out=OVER_ONE_ANOTHER), "out must have elements"),
    "windows": (
        lambda: step(conv=ConvInputs(torch.zeros(3 * H * D, 3).expand(4, -1, 3), OUT)),
        "conv_state must have elements that share no memory, got strides [0, 3, 1]",
    ),
    "layers": (
        lambda: kda_commit_(GATE, StateRef.pool(LAYERS, ROWS), RECORDS, ROWS, ROWS),
        "state_pool must have elements that share no memory",
    ),
    # what torch would record
    "output with a gradient": (
        lambda: step(out=OUT.clone().requires_grad_()),
        "kda_backend has no backward pass",
    ),
}


@pytest.mark.interpreter
@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_is_refused(call: Call, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert message in str(raised.value)
    for written in (POOL, OUT, LAYERS, RECORDS.correction, RECORDS.key_gate, SNAPSHOTS[1]):
        assert not written.any()
