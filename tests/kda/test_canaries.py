"""Known bugs, planted one at a time: the checks of this suite must see each of them.

Every canary first shows that the kernel as it is passes the same check on the same inputs.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kda_backend.kernels import intra, recurrent, scan
from kda_backend.prefill import two_stage as prefill
from kda_backend.recurrent import recurrent as decode
from kda_backend.testing.cases import Case, make_case
from tests.kda.cases import Backend, Run, assert_causal, assert_close, assert_result

Plant = Callable[..., None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plant:
    """Replace a kernel's module, for one test, by its source with some text exchanged."""

    def replace(module: ModuleType, *exchanges: tuple[str, str]) -> None:
        name = module.__name__
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        for old, new in exchanges:
            assert source.count(old) == 1, f"{name} has no longer exactly one {old!r}"
            source = source.replace(old, new)
        # a file: Triton reads a kernel's source from where it was defined
        file = tmp_path / f"{name.rpartition('.')[2]}.py"
        file.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        mutant = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(mutant)
        monkeypatch.setitem(sys.modules, name, mutant)
        for owner, builder in ((prefill, "_two_stage_kernels"), (decode, "_recurrent_kernel")):
            fresh = functools.cache(getattr(owner, builder).__wrapped__)
            monkeypatch.setattr(owner, builder, fresh)

    return replace


def run_on(kernels: Backend, operator_name: str, path_name: str) -> Run:
    """An operator on one named path, whatever the table prefers for the grid."""
    operator = kernels.chunk if operator_name == "prefill" else kernels.recurrent

    def run(case: Case, **overrides: Any) -> tuple[torch.Tensor, ...]:
        return operator(
            case, selection=kernels.selection_of(case.shape, operator_name, path_name), **overrides
        )

    return run


@pytest.fixture
def kernels(device: torch.device) -> Backend:
    return Backend("kernels", device)


@pytest.fixture
def chunk(kernels: Backend) -> Run:
    return run_on(kernels, "prefill", "two_stage")


@pytest.fixture
def token(kernels: Backend) -> Run:
    return run_on(kernels, "recurrent", "recurrent")


def test_prefill_reading_the_state_transposed_is_seen(
    kernels: Backend, chunk: Run, plant: Plant, seed: int
) -> None:
    """[K, V] for [V, K]: of one size where K = V, so no shape check can see it."""
    case = make_case(seed, (70,)).to(kernels.device)
    assert_result(case, *chunk(case))
    plant(
        scan,
        (
            "o_v[None, :] * stride_state_in_v + o_k[:, None] * stride_state_in_k",
            "o_v[None, :] * stride_state_in_k + o_k[:, None] * stride_state_in_v",
        ),
    )
    with pytest.raises(AssertionError, match="is off by"):
        assert_result(case, *chunk(case))


def test_decode_reading_the_state_transposed_is_seen(
    kernels: Backend, token: Run, plant: Plant, seed: int
) -> None:
    case = make_case(seed, (1, 1)).to(kernels.device)
    assert_result(case, *token(case))
    plant(
        recurrent,
        (
            "o_v[:, None] * stride_state_in_v + o_k[None, :] * stride_state_in_k",
            "o_v[:, None] * stride_state_in_k + o_k[None, :] * stride_state_in_v",
        ),
    )
    with pytest.raises(AssertionError, match="is off by"):
        assert_result(case, *token(case))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(
            "ex2(tl.sum(b_total, 0), FAST_MATH)", "tl.exp(tl.sum(b_total, 0))", id="total"
        ),
        pytest.param(
            "ex2(b_total, FAST_MATH).to(DOT)", "tl.exp(b_total).to(DOT)", id="between blocks"
        ),
        pytest.param(
            "ex2(b_sum, FAST_MATH).to(b_k.dtype)", "tl.exp(b_sum).to(b_k.dtype)", id="scores"
        ),
        pytest.param(
            "b_decay = ex2(b_sum, FAST_MATH).to(DOT)",
            "b_decay = tl.exp(b_sum).to(DOT)",
            id="q_in, k_in",
        ),
        pytest.param(
            "b_k * ex2(b_sum, FAST_MATH).to(DOT)", "b_k * tl.exp(b_sum).to(DOT)", id="k_out"
        ),
    ],
)
def test_exp_for_exp2_on_one_factor_of_prefill_is_seen(
    kernels: Backend, chunk: Run, plant: Plant, seed: int, old: str, new: str
) -> None:
    case = make_case(seed, (130,), regime="init").to(kernels.device)
    assert_result(case, *chunk(case))
    plant(intra, (old, new))
    with pytest.raises(AssertionError, match="is off by"):
        assert_result(case, *chunk(case))


def test_exp_for_exp2_in_decode_is_seen(
    kernels: Backend, token: Run, plant: Plant, seed: int
) -> None:
    case = make_case(seed, (1, 3), regime="init").to(kernels.device)
    assert_result(case, *token(case))
    plant(recurrent, ("b_state *= ex2(b_g, FAST_MATH)", "b_state *= tl.exp(b_g)"))
    with pytest.raises(AssertionError, match="is off by"):
        assert_result(case, *token(case))


# The four levels of a block's scores, each relative to a token of the past, become one level whose
# rows and columns are relative to an anchor: x 2^(G_r - a), k 2^(a - G_c).
_TREE = """\
        b_aq0, b_ak0 = _level(b_aq0, b_ak0, b_q, b_k, b_g, 0, PRECISION, FAST_MATH)
        b_aq0, b_ak0 = _level(b_aq0, b_ak0, b_q, b_k, b_g, 1, PRECISION, FAST_MATH)
        b_aq0, b_ak0 = _level(b_aq0, b_ak0, b_q, b_k, b_g, 2, PRECISION, FAST_MATH)
        b_aq0, b_ak0 = _level(b_aq0, b_ak0, b_q, b_k, b_g, 3, PRECISION, FAST_MATH)
"""
_ANCHORED = """\
        b_rel = tl.dot(_sum_mask(_PREFIX, DOT), b_g, input_precision=PRECISION)
        o_s = tl.arange(0, 16)
        b_rel -= {anchor}
        b_up = ex2({row}, FAST_MATH).to(DOT)
        b_y = b_k * ex2({column}, FAST_MATH).to(DOT)
        m_past = (o_s[:, None] > o_s[None, :])[None, :, :]
        b_aq0 += tl.where(m_past, _scores(b_q * b_up, b_y, None, PRECISION), 0.0)
        b_ak0 += tl.where(m_past, _scores(b_k * b_up, b_y, None, PRECISION), 0.0)
"""


def test_a_clamped_decay_exponent_is_seen(
    kernels: Backend, chunk: Run, plant: Plant, seed: int
) -> None:
    """Anchored at a block's start, 2^-G overflows; a clamp at 126 hides that and is wrong."""
    mild, extreme = (
        make_case(seed, (70,), regime=regime, dtype=torch.float32).to(kernels.device)
        for regime in ("weak", "extreme")
    )
    assert_result(extreme, *chunk(extreme))
    clamped = _ANCHORED.format(
        anchor="0.0", row="tl.maximum(b_rel, -126.0)", column="tl.minimum(-b_rel, 126.0)"
    )
    plant(intra, (_TREE, clamped))
    # mild gates do not reveal it
    assert_result(mild, *chunk(mild))
    with pytest.raises(AssertionError, match="is off by"):
        assert_result(extreme, *chunk(extreme))


@pytest.mark.parametrize("anchor_row", [8, 15])
def test_an_anchor_that_looks_ahead_is_seen(
    kernels: Backend, chunk: Run, plant: Plant, seed: int, anchor_row: int
) -> None:
    """Relative to a later token the scores are as exact, but later gates enter earlier rows."""
    case = make_case(seed, (64,), regime="weak", value_dim=16, dtype=torch.float32).to(
        kernels.device
    )
    positions = (20, 50)
    assert_causal(case, chunk, positions)
    m_anchor = f"(o_s == {anchor_row})[None, :, None]"
    anchor = f"tl.sum(tl.where({m_anchor}, b_rel, 0.0), 1)[:, None, :]"
    plant(intra, (_TREE, _ANCHORED.format(anchor=anchor, row="b_rel", column="-b_rel")))
    # no comparison with the definition reveals it
    assert_result(case, *chunk(case))
    with pytest.raises(AssertionError, match="output before token"):
        assert_causal(case, chunk, positions)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_passes(value: float) -> None:
    want = torch.ones(4, dtype=torch.float64)
    got = want.clone()
    assert_close("same", got, want, 0.0)
    got[2] = value
    for tolerance in (0.0, 1.0, 1e300):
        with pytest.raises(AssertionError, match="is off by"):
            assert_close("one element", got, want, tolerance)
    with pytest.raises(AssertionError, match="is off by"):
        assert_close("expectation", want, got, 1.0)
