"""The verification of drafts from records on Hopper in CUDA C++ (kernels/sm90/verify_records.cu),
for K = V = 128; `kda_commit_` stays with Triton's kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from backend_core.launch.cuda_params import CudaParams
from kda_backend.contract.calls import CommitCall, VerifyCall
from kda_backend.decode_step.fused_sm90 import HopperStep
from kda_backend.launch_params import FusedRecordsSm90Params
from kda_backend.token_spec import TYPE_CODES
from kda_backend.verify_records.fused import RecordsFold

if TYPE_CHECKING:
    from backend_core.tables.schema import Row
    from backend_core.target import Target
    from kda_backend.selection import KdaShape

SOURCE = Path(__file__).parents[1] / "kernels" / "sm90" / "verify_records.cu"
THREADS = 256
CTAS_PER_SM = 2
MAX_STRIDE = 1 << 27  # elements from token to token, or from column to column of a window
PARAMS = CudaParams(
    (
        ("q", "Rows"),  # [tokens, H, 128], like k
        ("k", "Rows"),
        ("v", "Rows"),  # [tokens, HV, 128], like g
        ("g", "Rows"),
        ("beta", "Rows"),  # [tokens, HV]
        ("a_log", "const void*"),  # [HV], or null
        ("dt_bias", "const void*"),  # [HV, 128], or null
        ("state", "Rows"),  # [slots, HV, 128, 128]
        ("indices", "const int*"),  # [N]: slots
        ("correction", "Rows"),  # [rows, HV, max_tokens, 128] fp32
        ("key_gate", "Rows"),  # [rows, HV, max_tokens, 256]
        ("record_indices", "const int*"),  # [N]: rows
        ("num_accepted", "const int*"),  # [N], or null
        ("conv_state", "Windows"),  # [slots, C, W]
        ("conv_weight", "const void*"),  # [C, 4]
        ("conv_bias", "const void*"),  # [C]
        ("windows", "Buffers"),  # [rows, max_tokens, C, 3]
        ("norm_weight", "const void*"),  # [128]
        ("norm_gate", "Rows"),  # [tokens, HV, 128], like out
        ("out", "Rows"),
        ("cu_seqlens", "const void*"),  # [N + 1], or null
        ("tokens_per_sequence", "int"),  # without cu_seqlens
        ("max_tokens", "int"),
        ("heads", "int"),  # value heads
        ("heads_per_key", "int"),
        ("null_slot", "int"),  # sequences at it, as those at negative slots, are padding
        ("by_norm", "int"),  # corrections are divided by |k|
        ("lower_bound", "float"),
        ("scale", "float"),
        ("eps", "float"),
    ),
    {
        "Rows": (("ptr", "void*"), ("stride", "i64")),
        "Windows": (("ptr", "void*"), *((f"stride_{axis}", "i64") for axis in "ncw")),
        "Buffers": (("ptr", "void*"), *((f"stride_{axis}", "i64") for axis in "ntcw")),
    },
    (
        *("q", "k", "v", "g", "beta", "a_log", "dt_bias", "state", "indices", "correction"),
        *("key_gate", "record_indices", "num_accepted", "conv_state", "conv_weight", "conv_bias"),
        *("windows", "norm_weight", "norm_gate", "out", "cu_seqlens"),
    ),
)


def bind(row: Row, spec: KdaShape, target: Target) -> FusedRecordsSm90:
    return FusedRecordsSm90(row.params)


class FusedRecordsSm90(HopperStep):
    """One launch: a cluster of ``split`` CTAs shares a head's state.

    The CTAs are placed while the kernel before runs, and wait for its end.
    """

    source, params, state_at, taps_at = SOURCE, PARAMS, 7, 14

    def __init__(self, params: FusedRecordsSm90Params) -> None:
        super().__init__()
        self._params, self._fold = params, RecordsFold(params)

    def commit(self, call: CommitCall) -> None:
        self._fold.commit(call)

    def _tensors_of(self, call: VerifyCall) -> tuple[torch.Tensor | None, ...]:
        tokens, gate, state, draft, _, conv, norm, out = call
        return (
            *(*tokens[:5], gate.a_log, gate.dt_bias, state.write, state.indices),
            *(draft.correction, draft.key_gate, draft.indices, draft.num_accepted),
            *(*(conv or (None, None, None)), draft.windows, *(norm or (None, None))[:2]),
            *(out, draft.cu_seqlens),
        )

    def _launch_of(self, call: VerifyCall) -> Callable[[list[int]], None]:
        tokens, gate, state, draft, shape, conv, norm, out = call
        kernel = self.kernel(defines_of(self._params, call))
        rows: dict[str, torch.Tensor | None] = {
            **{"q": tokens.q, "k": tokens.k, "v": tokens.v, "g": tokens.g, "beta": tokens.beta},
            **{"state": state.write, "correction": draft.correction, "key_gate": draft.key_gate},
            **{"norm_gate": None if norm is None else norm.gate, "out": out},
        }
        strides = {name: (0,) if x is None else x.stride()[:1] for name, x in rows.items()}
        strides["conv_state"] = (0, 0, 0) if conv is None else conv.state.stride()
        strides["windows"] = (0,) * 4 if draft.windows is None else draft.windows.stride()
        for name in ("q", "k", "v", "g", "norm_gate", "out", "conv_state", "windows"):
            if strides[name][-1] >= MAX_STRIDE:
                raise ValueError(
                    f"{name} must have a stride below {MAX_STRIDE} for path fused_sm90, got"
                    f" {strides[name][-1]}"
                )
        number, value_heads = tokens.v.shape[:2]
        params = PARAMS.at(
            strides,
            tokens_per_sequence=number // max(shape.num_sequences, 1),
            max_tokens=shape.max_tokens,
            heads=value_heads,
            heads_per_key=value_heads // tokens.q.shape[1],
            null_slot=state.null_slot,
            by_norm=draft.by_norm,
            lower_bound=gate.lower_bound,
            scale=tokens.scale,
            eps=0.0 if norm is None else norm.eps,
        )
        ctas = shape.num_sequences * value_heads * self._params.split
        return lambda addresses: kernel(ctas, THREADS, params(*addresses), pdl=True)


def defines_of(params: FusedRecordsSm90Params, call: VerifyCall) -> dict[str, int]:
    """Preprocessor constants of the kernel that serves a call."""
    tokens, gate, state, draft, _, conv, norm, _ = call
    conv_state, taps, bias = conv or (None, None, None)
    norm_weight, norm_gate = (norm or (None, None))[:2]
    types = {
        **{"STATE": state.write, "X": tokens.q, "BETA": tokens.beta},
        **{"A": gate.a_log, "DT": gate.dt_bias, "CONV": conv_state, "TAPS": taps, "BIAS": bias},
        **{"WINDOWS": draft.windows, "NORM": norm_weight, "Z": norm_gate},
    }
    wide = draft.cu_seqlens is not None and draft.cu_seqlens.dtype == torch.int64
    return {
        "SPLIT": params.split,
        "MIN_BLOCKS": CTAS_PER_SM,
        "GATE": int(gate.kind),
        "BETA": int(tokens.beta_kind),
        "L2NORM": int(tokens.l2norm),
        "CU_INT64": int(wide),
        **{f"HAS_{name}": int(types[name] is not None) for name in ("CONV", "BIAS", "NORM")},
        "HAS_WINDOWS": int(draft.windows is not None),
        **{
            f"DT_{name}": TYPE_CODES[torch.float32 if x is None else x.dtype]
            for name, x in types.items()
        },
    }
