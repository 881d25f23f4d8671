"""One KDA layer: weights under the recall checkpoint's names, and its mathematics in float64."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from kda_backend import reference

CHECKPOINT = Path(__file__).parents[3] / "benchmarks" / "recall" / "checkpoint"
HIDDEN, DIM, EPS = 256, 128, 1e-5

Weights = dict[str, torch.Tensor]


@functools.cache
def checkpoint_weights(index: int, folder: str = CHECKPOINT.name) -> Weights:
    """The parameters of a layer of one of the recall benchmark's checkpoints."""
    prefix = f"model.layers.{index}.self_attn."
    file = load_file(CHECKPOINT.with_name(folder) / "model.safetensors")
    return {name.removeprefix(prefix): x for name, x in file.items() if name.startswith(prefix)}


def drawn(heads: int = 2, low_rank: str = "fg") -> Weights:
    """Random weights at the checkpoint's scale.

    Args:
        low_rank: gates whose projections are two matrices: ``"f"`` and ``"g"``.
    """
    rng = torch.Generator().manual_seed(7)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float32)

    channels = heads * DIM
    weights = {f"{part}_proj.weight": 0.06 * randn(channels, HIDDEN).bfloat16() for part in "qkv"}
    weights["b_proj.weight"] = 0.06 * randn(heads, HIDDEN).bfloat16()
    for part in "fg":
        if part in low_rank:
            weights[f"{part}_a_proj.weight"] = 0.06 * randn(DIM, HIDDEN).bfloat16()
            weights[f"{part}_b_proj.weight"] = 0.09 * randn(channels, DIM).bfloat16()
        else:
            weights[f"{part}_proj.weight"] = 0.06 * randn(channels, HIDDEN).bfloat16()
    for part in "qkv":
        weights[f"{part}_conv1d.weight"] = 0.5 * randn(channels, 1, 4)
    weights["A_log"] = randn(heads)
    weights["dt_bias"] = randn(channels)
    weights["o_norm.weight"] = 1.0 + 0.1 * randn(DIM).bfloat16()
    weights["o_proj.weight"] = 0.02 * randn(HIDDEN, channels).bfloat16()
    return weights


class Definition:
    """One sequence through upstream's layer by its mathematics in float64.

    Attributes:
        window: ``[C, 3]``, what the convolution keeps; state: ``[1, H, V, K]``.
    """

    def __init__(
        self,
        weights: Weights,
        lower_bound: float | None = None,
        window: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
        eps: float = EPS,
    ) -> None:
        self.eps = eps
        self.w = {name: x.double() for name, x in weights.items()}
        self.lower_bound = lower_bound
        self.heads = self.w["b_proj.weight"].shape[0]
        if window is None:
            window = torch.zeros(3 * self.heads * DIM, 3)
        if state is None:
            state = torch.zeros(self.heads, DIM, DIM)
        self.window, self.state = window.double(), state.double()[None]

    def _gate(self, part: str, x: torch.Tensor) -> torch.Tensor:
        if f"{part}_proj.weight" in self.w:
            y = x @ self.w[f"{part}_proj.weight"].T
        else:
            y = x @ self.w[f"{part}_a_proj.weight"].T @ self.w[f"{part}_b_proj.weight"].T
        return y.view(-1, self.heads, DIM)

    def run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The next tokens ``[T, hidden]``; returns ``[T, hidden]`` and moves the states on."""
        w, x = self.w, hidden_states.double()
        qkv = torch.cat([x @ w[f"{part}_proj.weight"].T for part in "qkv"], 1)
        filters = torch.cat([w[f"{part}_conv1d.weight"].flatten(1) for part in "qkv"])
        line = torch.cat([self.window, qkv.T], 1)
        self.window = line[:, -3:]
        mixed = F.silu(F.conv1d(line[None], filters[:, None], groups=line.shape[0])[0]).T
        q, k, v = mixed.reshape(x.shape[0], 3, self.heads, DIM).unbind(1)
        bias = w["dt_bias"].view(self.heads, DIM)
        o, self.state = reference.recurrent_kda(
            reference.l2norm(q),
            reference.l2norm(k),
            v,
            reference.log_decay(self._gate("f", x), w["A_log"].flatten(), bias, self.lower_bound),
            (x @ w["b_proj.weight"].T).sigmoid(),
            scale=DIM**-0.5,
            state=self.state,
            cu_seqlens=[0, x.shape[0]],
        )
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + self.eps) * w["o_norm.weight"]
        return (o * self._gate("g", x).sigmoid()).flatten(1) @ w["o_proj.weight"].T
