"""Inputs of the operators on sequences, and what the definition says of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from kda_backend import reference
from kda_backend.contract.values import LOG_DECAY, GateSpec, TokenInputs
from kda_backend.selection import KdaShape
from kda_backend.spec import Beta
from kda_backend.testing.regimes import collinear, gate_parameters

LOWER_BOUND = -5.0
TOKEN_FIELDS = ("q", "k", "v", "g", "beta")


@dataclass(frozen=True, kw_only=True)
class Gated:
    """How tokens are meant: a layer's gate, step size and norm.

    Attributes:
        a_log, dt_bias: fp32 or ``None``.
        gate: ``"log"``, ``"softplus"`` or ``"bounded"``.
        beta_kind: ``"given"``, ``"sigmoid"`` or ``"twice_sigmoid"``.
    """

    a_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    gate: str = "softplus"
    beta_kind: str = "sigmoid"
    l2norm: bool = True
    scale: float | None = None

    def inputs_of(self, tokens: Sequence[torch.Tensor]) -> tuple[TokenInputs, GateSpec]:
        """q, k, v, g and beta as the operators take them."""
        q, k, v, g, beta = tokens
        kind, gate = Beta[self.beta_kind.upper()], LOG_DECAY
        if self.gate != "log":
            bound = LOWER_BOUND if self.gate == "bounded" else None
            gate = GateSpec.of(self.a_log, self.dt_bias, bound)
        options = {"beta_kind": kind, "l2norm": self.l2norm, "scale": self.scale}
        return TokenInputs.of(q, k, v, g, beta, **options), gate  # type: ignore[arg-type]

    def activated_of(self, tokens: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """q, k, v, log decay and step size by the definition, in the tokens' dtype."""
        q, k, v, g, beta = tokens
        if self.l2norm:
            q, k = reference.l2norm(q), reference.l2norm(k)
        if self.gate != "log":
            a_log, dt_bias = (None if x is None else x.to(g) for x in (self.a_log, self.dt_bias))
            bound = LOWER_BOUND if self.gate == "bounded" else None
            g = reference.log_decay(g, a_log, dt_bias, bound)
        if self.beta_kind != "given":
            beta = beta.sigmoid() * (2.0 if self.beta_kind == "twice_sigmoid" else 1.0)
        return q, k, v, g, beta

    def to(self, device: torch.device) -> Self:
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class Case(Gated):
    """One call's inputs, all sequences packed in one row.

    Attributes:
        lengths: tokens of each sequence.
        q, k, v, g, beta: as the operators take them, ``[1, T, ...]``.
        state: ``[N, HV, V, K]`` fp32 before each sequence.
    """

    lengths: tuple[int, ...]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor

    @property
    def offsets(self) -> list[int]:
        return offsets_of(self.lengths)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return cu_tensor(self.lengths, self.q.device)

    @property
    def shape(self) -> KdaShape:
        heads, key_dim = self.q.shape[2:]
        value_heads, value_dim = self.v.shape[2:]
        bounded = self.gate == "bounded"
        dtypes = self.q.dtype, self.g.dtype
        return KdaShape(heads, value_heads, key_dim, value_dim, bounded, *dtypes)

    @property
    def tokens(self) -> tuple[torch.Tensor, ...]:
        return (self.q, self.k, self.v, self.g, self.beta)

    @property
    def inputs(self) -> tuple[TokenInputs, GateSpec]:
        """Tokens and gate as the operators take them."""
        return self.inputs_of(self.tokens)

    def options(self) -> dict[str, Any]:
        """The keyword arguments of FLA's functions that say how the tokens are meant."""
        return {
            "scale": self.scale,
            "use_qk_l2norm_in_kernel": self.l2norm,
            "use_gate_in_kernel": self.gate != "log",
            "lower_bound": LOWER_BOUND if self.gate == "bounded" else None,
            "use_beta_sigmoid_in_kernel": self.beta_kind != "given",
            "allow_neg_eigval": self.beta_kind == "twice_sigmoid",
            "A_log": self.a_log,
            "dt_bias": self.dt_bias,
        }

    def activated(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
        """Packed q, k, v, log decay and step size in float64, on the device."""
        return self.activated_of([x[0].double().to(device) for x in self.tokens])

    def expected(
        self, *, from_zero: bool | Sequence[int] = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, HV, V] and state [N, HV, V, K] by the recurrence in float64, on the CPU.

        ``from_zero``: all sequences start from zero, or those of the given numbers.
        """
        state = self.state.double().cpu()
        if from_zero is True:
            state = torch.zeros_like(state)
        elif from_zero:
            state[list(from_zero)] = 0.0
        scale = self.q.shape[3] ** -0.5 if self.scale is None else self.scale
        return reference.recurrent_kda(
            *self.activated(),
            scale=scale,
            state=state,
            cu_seqlens=self.offsets,
        )

    def part(self, begin: int, end: int, state: torch.Tensor) -> Case:
        """Tokens begin to end of a case of one sequence, as a sequence that starts at ``state``."""
        tokens = {name: getattr(self, name)[:, begin:end] for name in TOKEN_FIELDS}
        return dataclasses.replace(self, **tokens, lengths=(end - begin,), state=state)

    def only(self, n: int) -> Case:
        """Sequence n alone."""
        begin, end = self.offsets[n : n + 2]
        return self.part(begin, end, self.state[n : n + 1])


def draw_gates(
    regimes: Sequence[str],
    rng: torch.Generator,
    raw: torch.Tensor,
    k: torch.Tensor,
    logit: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A_log ``[HV]`` and dt_bias ``[HV, K]``, of which head h takes the regime at h modulo their
    number.

    Args:
        raw: ``[T, HV, K]``; k: ``[T, H, K]``; logit: ``[T, HV]``; changed to the regime's.
    """
    heads = raw.shape[1:]
    a_log, dt_bias = (torch.randn(n, generator=rng, device=rng.device) for n in (heads[:1], heads))
    for i, name in enumerate(regimes):
        own = slice(i, None, len(regimes))
        a_log[own], dt_bias[own], raw[:, own] = gate_parameters(name, raw[:, own], rng)
        if name == "collinear":
            k[:, own], logit[:, own] = collinear(k[:, own], logit[:, own])
    return a_log, dt_bias


def offsets_of(lengths: Sequence[int]) -> list[int]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets


def chunks_of(lengths: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """First token and token count of each chunk, and first chunk of each sequence."""
    start, length, offsets = [], [], [0]
    token = 0
    for n in lengths:
        for begin in range(0, n, 64):
            start.append(token + begin)
            length.append(min(64, n - begin))
        token += n
        offsets.append(len(start))
    return start, length, offsets


def cu_tensor(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(offsets_of(lengths), dtype=torch.int32, device=device)


def make_case(
    seed: int,
    lengths: Sequence[int] = (65,),
    *,
    regime: str | Sequence[str] = "random",
    gate: str = "softplus",
    with_a_log: bool = True,
    beta: str = "sigmoid",
    heads: int = 1,
    value_heads: int | None = None,
    key_dim: int = 32,
    value_dim: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    l2norm: bool = True,
    scale: float | None = None,
    device: torch.device | str = "cpu",
) -> Case:
    """Draw a case on the device.

    Args:
        regime: of `regimes.REGIMES`; of several, head h takes the one at h modulo their number.
        gate, beta: as `Case.gate` and `Case.beta_kind`.
    """
    rng = torch.Generator(device).manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng, device=rng.device)

    value_heads = heads if value_heads is None else value_heads
    total = sum(lengths)
    q, k = randn(1, total, heads, key_dim), randn(1, total, heads, key_dim)
    v, logit = randn(1, total, value_heads, value_dim), randn(1, total, value_heads)
    raw = randn(1, total, value_heads, key_dim)
    regimes = (regime,) if isinstance(regime, str) else tuple(regime)
    a_log, dt_bias = draw_gates(regimes, rng, raw[0], k[0], logit[0])
    if gate == "log":
        raw = reference.log_decay(raw, a_log, dt_bias, None)
    if beta == "given":
        logit = logit.sigmoid()
    if not l2norm:
        q, k = reference.l2norm(q), reference.l2norm(k)
    q, k, v, raw, logit = (x.to(dtype) for x in (q, k, v, raw, logit))
    return Case(
        lengths=tuple(lengths),
        q=q,
        k=k,
        v=v,
        g=raw,
        beta=logit,
        a_log=a_log if gate != "log" and with_a_log else None,
        dt_bias=dt_bias if gate != "log" else None,
        state=randn(len(lengths), value_heads, value_dim, key_dim),
        gate=gate,
        beta_kind=beta,
        l2norm=l2norm,
        scale=scale,
    )
