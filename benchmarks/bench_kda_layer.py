"""A KDA layer between its projections: with a separate convolution and with one inside the prefill.

    python -m benchmarks.bench_kda_layer --output benchmarks/results/kda_layer_h200.json

`kda_backend.layer.prefill` on the packed projection and an engine's pools, half of the sequences
with a state and a window from before. ``apart_us``: with the convolution of all channels in a
launch of its own, ``fused_us``: with that of q and k where the tiles are made
(`PrefillCostModel.fused_conv_tiles`). ``parts_us``: the launches by themselves. ``floor_us``: all
read and written once at the copy bandwidth of the run. Both forms are compared with float64 first
(``error``, ``apart_error``: relative L2 of the output and of the states, the larger), and the
windows to the bit.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from backend_core.testing.numerics import relative_error
from backend_core.testing.records import write_record
from backend_core.testing.timing import copy_bandwidth_gbs, environment, graph_time_ms
from benchmarks.kda_paths import only
from kda_backend import layer, reference
from kda_backend.contract.values import ConvInputs, GateSpec, NormInputs, StateRef, TokenInputs
from kda_backend.layer_stages import gated_norm, short_conv
from kda_backend.operators import kda_prefill
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection, KdaShape
from kda_backend.step_plan import build_step_plan
from kda_backend.testing.regimes import gate_parameters

DIM, TAPS = 128, 4
RAGGED = [1300, 547, 2048, 963, 271, 3063]
SHAPES = [(32, lens) for lens in ([512], [2048], [8192], [32768], [1024] * 8, [256] * 32, RAGGED)]
SHAPES += [(heads, [8192]) for heads in (16, 8, 4)]
LARGEST_CHECKED = 8192  # tokens of a sequence
ALLOWED_ERROR = 1.5e-2  # of a layer in bf16: its convolution, its delta rule and its norm round


class Layer:
    """One layer's weights, its tokens in one batch and its pools; sequence n has slot n + 1."""

    def __init__(
        self, heads: int, lengths: Sequence[int], device: str, lower_bound: float | None = None
    ) -> None:
        rng = torch.Generator(device).manual_seed(1)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=rng, device=device)

        tokens, channels, sequences = sum(lengths), 3 * heads * DIM, len(lengths)
        self.heads, self.lengths, self.channels = heads, list(lengths), channels
        a_log, dt_bias, g = gate_parameters("init", randn(tokens, heads, DIM), rng)
        self.weights = layer.LayerWeights(
            conv=0.5 * randn(channels, TAPS),
            gate=GateSpec.of(a_log, dt_bias.flatten(), lower_bound),
            norm=randn(DIM).bfloat16(),
            norm_eps=1e-5,
        )
        self.tokens = layer.Projections(
            qkv=randn(tokens, channels).bfloat16(),
            g=g.bfloat16(),
            beta=randn(tokens, heads).bfloat16(),
            gate=randn(tokens, heads, DIM).bfloat16(),
            out=torch.empty(tokens, heads, DIM, dtype=torch.bfloat16, device=device),
        )
        self.slots = torch.arange(sequences, dtype=torch.int32, device=device) + 1
        self.has_initial = torch.arange(sequences, device=device) % 2 == 0
        # token-major, as vLLM keeps windows
        windows = randn(sequences + 1, TAPS - 1, channels).bfloat16()
        self.before = (windows.transpose(1, 2), 0.3 * randn(sequences + 1, heads, DIM, DIM))
        self.pools = tuple(pool.clone() for pool in self.before)
        self.state = StateRef.pool(self.pools[1], self.slots, self.has_initial)
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        self.plan = build_step_plan(
            offsets.to(device), tokens, cu_seqlens_cpu=offsets, chunk_table=device != "cpu"
        )
        self.scratch = Scratch(torch.device(device))

    @property
    def shape(self) -> KdaShape:
        bounded = self.weights.gate.lower_bound != 0
        return KdaShape(self.heads, self.heads, DIM, DIM, bounded_gate=bounded)

    def run(self, selection: KdaSelection) -> None:
        """The layer's prefill on the pools, as an engine's later layers of a step call it."""
        layer.prefill(
            self.weights,
            selection,
            self.tokens,
            self.pools[0],
            self.state,
            self.plan,
            self.scratch,
        )

    def reset(self) -> None:
        """Pools as they were, and no output."""
        for pool, before in zip(self.pools, self.before, strict=True):
            pool.copy_(before)
        self.tokens.out.fill_(float("nan"))

    @functools.cached_property
    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output and both pools in float64."""
        weights, tokens = self.weights, self.tokens
        windows, states = (pool.double() for pool in self.before)
        lines = []
        for n, line in enumerate(tokens.qkv.split(self.lengths)):
            before = windows[n + 1] * self.has_initial[n]
            whole = torch.cat([before, line.double().T], 1)
            windows[n + 1] = whole[:, whole.shape[1] - (TAPS - 1) :]
            taps = weights.conv.double()[:, None]
            lines.append(F.silu(F.conv1d(whole[None], taps, groups=self.channels)[0]).T)
        q, k, v = torch.cat(lines).view(-1, 3, self.heads, DIM).unbind(1)
        _, a_log, dt_bias, bound = weights.gate
        assert a_log is not None and dt_bias is not None
        bias = dt_bias.double().view(self.heads, DIM)
        decay = reference.log_decay(tokens.g.double(), a_log.double(), bias, bound or None)
        initial = states[1:] * self.has_initial[:, None, None, None]
        o, states[1:], _ = reference.chunk_kda(
            reference.l2norm(q),
            reference.l2norm(k),
            v,
            decay,
            tokens.beta.double().sigmoid(),
            scale=DIM**-0.5,
            state=initial,
            cu_seqlens=[0, *itertools.accumulate(self.lengths)],
        )
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + weights.norm_eps)
        return o * weights.norm.double() * tokens.gate.double().sigmoid(), windows, states

    def error(self, selection: KdaSelection) -> float:
        """Of output and states, relative L2, the larger.

        Raises:
            AssertionError: it is above `ALLOWED_ERROR`, or a window is not the definition's.
        """
        self.reset()
        self.run(selection)
        out, windows, states = self.expected
        pairs = ((self.tokens.out, out), (self.pools[1][1:], states[1:]))
        error = max(relative_error(got, want) for got, want in pairs)
        assert error <= ALLOWED_ERROR, f"off by {error:.2e}, allowed {ALLOWED_ERROR:.1e} (rel. L2)"
        assert torch.equal(self.pools[0].double(), windows), "a window is wrong"
        return error

    def bytes_once(self) -> int:
        """Everything read once and written once; states and windows are both."""
        tokens = self.tokens
        rows = (tokens.qkv, tokens.g, tokens.beta, tokens.gate, tokens.out)
        sequences = len(self.lengths)
        pools = sum(2 * sequences * pool[0].nbytes for pool in self.pools)
        return sum(x.nbytes for x in rows) + pools

    def parts(self, selection: KdaSelection) -> dict[str, Callable[[], object]]:
        """The launches of the layer, each by itself."""
        weights, tokens, plan, state = self.weights, self.tokens, self.plan, self.state
        conv = ConvInputs(self.pools[0], weights.conv)
        mixed = short_conv(tokens.qkv, conv, state, plan)
        q, k, v = mixed.view(1, -1, 3, self.heads, DIM).unbind(2)
        rows = TokenInputs.of(q, k, v, tokens.g[None], tokens.beta[None])
        out = torch.empty_like(tokens.out)
        args: dict[str, Any] = {
            "out": out.unsqueeze(0),
            "scratch": self.scratch,
            "selection": selection,
        }
        norm = NormInputs(weights.norm, tokens.gate, weights.norm_eps)
        return {
            "conv": lambda: short_conv(tokens.qkv, conv, state, plan),
            "prefill": lambda: kda_prefill(rows, weights.gate, state, plan, **args),
            "norm": lambda: gated_norm(out, norm, plan),
        }


def forms(shape: KdaShape) -> tuple[KdaSelection, KdaSelection]:
    """The shipped row of the two stages with the convolution apart, and inside."""
    apart, fused = (only(shape, "two_stage_sm90", fused_conv_tiles=int(f)) for f in (False, True))
    return apart, fused


def row_of(heads: int, lengths: list[int], bandwidth_gbs: float) -> dict[str, Any]:
    made = Layer(heads, lengths, "cuda")
    apart, fused = forms(made.shape)
    row: dict[str, Any] = {"H": heads, "seq_lens": lengths}
    if max(lengths) <= LARGEST_CHECKED:
        row["error"], row["apart_error"] = made.error(fused), made.error(apart)
    made.reset()

    def us(call: Callable[[], object]) -> float:
        return round(1e3 * graph_time_ms(call, replays=11), 1)

    row["parts_us"] = {name: us(call) for name, call in made.parts(apart).items()}
    row["apart_us"], row["fused_us"] = (us(functools.partial(made.run, s)) for s in (apart, fused))
    row["floor_us"] = round(made.bytes_once() / bandwidth_gbs / 1e3, 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    head: dict[str, Any] = dict(environment())
    rows = []
    with torch.inference_mode():
        bandwidth = copy_bandwidth_gbs()
        head["copy_gbs"] = round(bandwidth)
        for heads, lengths in SHAPES:
            rows.append(row_of(heads, lengths, bandwidth))
            print(rows[-1], flush=True)
    write_record(args.output, {**head, "rows": rows})


if __name__ == "__main__":
    main()
