"""Inputs of the one-launch operators, and what the definition says of them in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backend_core.testing.numerics import poisoned
from kda_backend import reference
from kda_backend.contract.values import ConvInputs, GateSpec, NormInputs, TokenInputs
from kda_backend.selection import KdaShape
from kda_backend.testing.cases import Gated, draw_gates

EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class StepCase(Gated):
    """Projections of ``rows`` tokens of a layer, and the layer's parameters.

    Attributes:
        packed: ``[rows, C]``: q, k and v of one projection; g: ``[rows, HV, K]``;
            beta: ``[rows, HV]``; z: ``[rows, HV, V]``, the output's gate.
        conv_weight: ``[C, 4]`` fp32; conv_bias: ``[C]`` fp32; norm_weight: ``[V]``.
    """

    heads: int
    value_heads: int
    packed: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    z: torch.Tensor
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor
    norm_weight: torch.Tensor
    has_conv: bool = True
    has_bias: bool = True
    has_norm: bool = True

    @property
    def rows(self) -> int:
        return self.packed.shape[0]

    @property
    def channels(self) -> int:
        return self.packed.shape[1]

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the packed projection, as an engine has them."""
        keys = self.heads * self.g.shape[2]
        q, k, v = torch.split(self.packed, [keys, keys, self.channels - 2 * keys], 1)
        key_dim = self.g.shape[2]
        return (
            torch.unflatten(q, 1, (self.heads, key_dim)),
            torch.unflatten(k, 1, (self.heads, key_dim)),
            torch.unflatten(v, 1, (self.value_heads, -1)),
        )

    @property
    def shape(self) -> KdaShape:
        bounded = self.gate == "bounded"
        dtypes = self.packed.dtype, self.g.dtype
        key_dim, value_dim = self.g.shape[2], self.z.shape[2]
        return KdaShape(self.heads, self.value_heads, key_dim, value_dim, bounded, *dtypes)

    @property
    def tokens(self) -> tuple[torch.Tensor, ...]:
        return (*self.qkv, self.g, self.beta)

    def part(self, rows: slice | list[int]) -> StepCase:
        names = ("packed", "g", "beta", "z")
        return dataclasses.replace(self, **{name: getattr(self, name)[rows] for name in names})

    @property
    def inputs(self) -> tuple[TokenInputs, GateSpec]:
        """Tokens and gate as the operators take them."""
        return self.inputs_of(self.tokens)

    def stages(self, windows: torch.Tensor) -> dict[str, Any]:
        """The stages around the recurrence, by the operators' names of them."""
        found: dict[str, Any] = {}
        if self.has_conv:
            bias = self.conv_bias if self.has_bias else None
            found["conv"] = ConvInputs(windows, self.conv_weight, bias)
        if self.has_norm:
            found["norm"] = NormInputs(self.norm_weight, self.z, EPS)
        return found

    def expected(
        self, row: int, state: torch.Tensor, window: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out [HV, V], state [HV, V, K], window [C, 3]) after one token, in float64 on the CPU."""
        out, state, window = self.expected_rows([row], state.cpu()[None], window.cpu()[None])
        return out[0], state[0], window[0]

    def expected_rows(
        self,
        rows: list[int],
        states: torch.Tensor,
        windows: torch.Tensor,
        keys: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out [n, HV, V], states [n, HV, V, K], windows [n, C, 3]) after one token of each of n
        sequences, whose token is a row of the case; in float64, on the device of ``states``.

        ``keys [n, H, K]`` are in the place of k, behind the convolution and before its norm.
        """
        device = states.device

        def double(x: torch.Tensor) -> torch.Tensor:
            return x.double().to(device)

        q, k, v, columns = self._convolved(rows, windows, device)
        k = k if keys is None else double(keys)
        key_dim, count = self.g.shape[2], len(rows)
        tokens = self.activated_of([q, k, v, double(self.g[rows]), double(self.beta[rows])])
        # heads of different rows do not meet: one token of n times as many heads
        o, state = reference.recurrent_kda(
            *(y.flatten(0, 1)[None] for y in tokens),
            scale=key_dim**-0.5,
            state=states.double().flatten(0, 1)[None],
            cu_seqlens=[0, 1],
        )
        o = torch.unflatten(o[0], 0, (count, -1))
        if self.has_norm:
            o = o / (o.square().mean(-1, keepdim=True) + EPS).sqrt()
            o = o * double(self.norm_weight) * double(self.z[rows]).sigmoid()
        return o, torch.unflatten(state[0], 0, (count, -1)), columns[:, :, 1:]

    def expected_keys(self, rows: list[int], windows: torch.Tensor) -> torch.Tensor:
        """k ``[n, H, K]`` of rows behind the convolution and before its norm, in float64."""
        return self._convolved(rows, windows, windows.device)[1]

    def _convolved(
        self, rows: list[int], windows: torch.Tensor, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """q, k ``[n, H, K]`` and v ``[n, HV, V]`` of rows, and the inputs ``[n, C, 4]``."""
        x = self.packed[rows].double().to(device)
        columns = torch.cat([windows.double().to(device), x[:, :, None]], 2)
        if self.has_conv:
            x = (columns * self.conv_weight.double().to(device)).sum(2)
            if self.has_bias:
                x = x + self.conv_bias.double().to(device)
            x = x * torch.sigmoid(x)
        key_dim, value_dim = self.g.shape[2], self.z.shape[2]
        keys = self.heads * key_dim
        q, k = (torch.unflatten(y, 1, (-1, key_dim)) for y in (x[:, :keys], x[:, keys : 2 * keys]))
        return q, k, torch.unflatten(x[:, 2 * keys :], 1, (-1, value_dim)), columns


def make_step(
    seed: int,
    rows: int,
    *,
    device: torch.device,
    heads: int = 2,
    value_heads: int | None = None,
    key_dim: int = 16,
    value_dim: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    regime: Sequence[str] = ("weak", "random"),
    **flags: Any,
) -> StepCase:
    """Draw the projections of ``rows`` tokens; value head h takes regime h modulo their number.

    ``flags``: of `StepCase`.
    """
    rng = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng)

    value_heads = heads if value_heads is None else value_heads
    keys, channels = heads * key_dim, 2 * heads * key_dim + value_heads * value_dim
    raw, beta = randn(rows, value_heads, key_dim), randn(rows, value_heads)
    packed = randn(rows, channels)
    k = packed[:, keys : 2 * keys].view(rows, heads, key_dim)
    a_log, dt_bias = draw_gates(regime, rng, raw, k, beta)
    if flags.get("gate") == "log":
        raw = reference.log_decay(raw, a_log, dt_bias, None)
    if flags.get("beta_kind") == "given":
        beta = beta.sigmoid()
    if not flags.get("l2norm", True):
        packed[:, : 2 * keys] *= 0.5 * key_dim**-0.5
    return StepCase(
        heads=heads,
        value_heads=value_heads,
        packed=packed.to(dtype),
        g=raw.to(dtype),
        beta=beta.to(dtype),
        z=randn(rows, value_heads, value_dim).to(dtype),
        a_log=a_log,
        dt_bias=dt_bias,
        conv_weight=0.5 * randn(channels, 4),
        conv_bias=randn(channels),
        norm_weight=1.0 + 0.1 * randn(value_dim),
        **flags,
    ).to(device)


class StepPools:
    """A state pool and a window pool of NaN around the slots that are filled.

    Attributes:
        states: ``[slots, HV, V, K]``, slots further apart than a state needs.
        windows: ``[slots, C, W]`` by strides: ``layout`` "SD" keeps the channels of an input
            adjacent, "DS" the inputs of a channel.
    """

    def __init__(
        self,
        case: StepCase,
        slots: int,
        *,
        dtype: torch.dtype = torch.float32,
        layout: str = "SD",
        width: int = 3,
    ) -> None:
        heads, value_dim, key_dim = case.value_heads, case.z.shape[2], case.g.shape[2]
        size, gap = heads * value_dim * key_dim, 16
        device = case.packed.device
        self.memory = poisoned(slots * (size + gap) + gap, dtype=dtype, device=device)
        self.states = self.memory.as_strided(
            (slots, heads, value_dim, key_dim),
            (size + gap, value_dim * key_dim, key_dim, 1),
            gap,
        )
        shape = (slots, width, case.channels) if layout == "SD" else (slots, case.channels, width)
        self.window_memory = poisoned(*shape, dtype=case.packed.dtype, device=device)
        self.windows = self.window_memory
        if layout == "SD":
            self.windows = self.window_memory.transpose(1, 2)

    def fill(self, seed: int, slots: list[int]) -> None:
        rng = torch.Generator().manual_seed(seed)
        for slot in slots:
            for pool in (self.states, self.windows):
                values = torch.randn(pool.shape[1:], generator=rng)
                pool[slot] = values.to(pool.device, pool.dtype)

    def copy(self) -> StepPools:
        other = object.__new__(StepPools)
        other.memory, other.window_memory = self.memory.clone(), self.window_memory.clone()
        for name, mine, theirs in (
            ("states", self.states, other.memory),
            ("windows", self.windows, other.window_memory),
        ):
            view = theirs.as_strided(mine.shape, mine.stride(), mine.storage_offset())
            setattr(other, name, view)
        return other
