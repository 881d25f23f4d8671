"""Bad input: one sentence that says what was expected and what came, and nothing written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backend_core.target import KNOWN_TARGETS
from mla_backend.api import mla_decode, select_mla_decode
from mla_backend.contract.mla_decode import split_cache
from mla_backend.plan import MlaPlanner
from mla_backend.spec import MlaSpec
from mla_backend.step_plan import MlaPlan
from mla_backend.testing.cases import SCALE, forced, make_case

SPEC = MlaSpec(4, 64)


def arguments() -> dict[str, Any]:
    case = make_case(SPEC, [100, 30])
    planner = MlaPlanner(forced(SPEC, "torch"))
    return {
        "q_latent": case.q_latent,
        "q_rope": case.q_rope,
        "kv_latent": case.kv_latent,
        "kv_rope": case.kv_rope,
        "block_table": case.block_table,
        "plan": planner.plan(case.lengths),
        "selection": planner.selection,
        "scale": SCALE,
        "out": torch.full((2, 1, 4, 512), 7.0, dtype=torch.bfloat16),
        "lse": torch.full((2, 1, 4), 7.0),
    }


def other_plan(requests: int, tokens: int) -> MlaPlan:
    spec = MlaSpec(4, 64, query_tokens=tokens)
    lengths = torch.full((requests,), 40, dtype=torch.int32)
    return MlaPlanner(forced(spec, "torch")).plan(lengths)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_latent": torch.zeros(2, 1, 4, 576).bfloat16()},
         r"q_latent must have shape \[2, 1, 4, 512\], got \[2, 1, 4, 576\]"),
        ({"q_rope": torch.zeros(2, 1, 4, 64)}, "q_rope must have dtype bfloat16, got float32"),
        ({"q_latent": torch.zeros(2, 1, 512, 4).bfloat16().mT},
         "q_latent must have stride 1 in dimension 3, got 4"),
        ({"kv_latent": torch.zeros(9, 32, 512).bfloat16()},
         r"kv_latent must have shape \[pages, 64, 512\], got \[9, 32, 512\]"),
        ({"kv_latent": None}, r"kv_latent must be a torch\.Tensor, got NoneType"),
        ({"kv_latent": torch.zeros(()).bfloat16()}, r"shape \[pages, 64, 512\], got \[\]"),
        ({"kv_rope": torch.zeros(9, 64, 64).half()}, "kv_rope must have "),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int32)},
         r"block_table must have shape \[2, pages\], got \[3, 4\]"),
        ({"block_table": torch.zeros(2, 4)}, "block_table must have dtype int32, got float32"),
        ({"scale": 0.0}, "scale must be positive and finite, got 0.0"),
        ({"scale": float("nan")}, "scale must be positive and finite, got nan"),
        ({"scale": [0.1]}, r"scale must be a number, got \[0\.1\]"),
        ({"sinks": torch.zeros(5)}, r"sinks must have shape \[4\], got \[5\]"),
        ({"out": torch.zeros(2, 4, 512).bfloat16()}, r"out must have shape \[2, 1, 4, 512\]"),
        ({"lse": torch.zeros(2, 1, 8)[..., ::2]}, "lse must be contiguous"),
        ({"plan": torch.ones(2)}, "plan must be a plan of MlaPlanner, got Tensor"),
        ({"plan": other_plan(3, 1)}, r"q_latent must have shape \[3, 1, 4, 512\]"),
        ({"plan": other_plan(2, 2)}, "plan must be for 1 query tokens, got one for 2"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(changes: dict[str, Any], message: str) -> None:
    given = arguments()
    out, lse = given["out"], given["lse"]
    with pytest.raises(ValueError, match=message) as error:
        mla_decode(**{**given, **changes})
    assert "\n" not in str(error.value)
    assert (out == 7).all() and (lse == 7).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "num_heads must be 1 to 128, got 0"),
        ({"query_tokens": 9}, "query_tokens must be 1 to 8, got 9"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"dtype": torch.float64}, "dtype must be bfloat16, float16 or float32"),
    ],
)
def test_a_spec_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MlaSpec(**{"num_heads": 4, "page_size": 64, **arguments})


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.zeros(2), "lengths must have dtype int32, got float32"),
        (torch.zeros(2, 1, dtype=torch.int32), r"lengths must have shape \[requests\]"),
        (torch.zeros(0, dtype=torch.int32), "lengths must have 1 to 4095 requests, got 0"),
        (torch.zeros(6, dtype=torch.int32)[::2], "lengths must have stride 1 in dimension 0"),
    ],
)
def test_lengths_that_cannot_be(lengths: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MlaPlanner(forced(SPEC, "torch")).plan(lengths)


def test_a_plan_is_written_again_for_its_lengths_and_query_tokens_only() -> None:
    lengths = torch.full((2,), 1000, dtype=torch.int32)
    own = MlaPlanner(forced(SPEC, "torch"))
    other = MlaPlanner(forced(MlaSpec(4, 64, query_tokens=2), "torch"))
    for planner, plan in ((own, other.plan(lengths)), (other, own.plan(lengths))):
        before = plan.work.clone()
        with pytest.raises(ValueError, match="out must be a plan with the query tokens and list"):
            planner.plan(lengths, out=plan)
        assert torch.equal(plan.work, before)
    plan = own.plan(lengths)
    assert own.plan(lengths, out=plan) is plan
    with pytest.raises(ValueError, match="out must be a plan of the same lengths tensor"):
        own.plan(lengths.clone(), out=plan)


def test_a_plan_of_inference_mode_is_written_again_outside_of_it() -> None:
    planner, lengths = MlaPlanner(forced(SPEC, "torch")), torch.tensor([300, 20], dtype=torch.int32)
    with torch.inference_mode():
        plan = planner.plan(lengths)
    lengths.copy_(torch.tensor([1, 4000]))
    assert torch.equal(planner.plan(lengths, out=plan).work, planner.plan(lengths).work)


def test_shared_prefixes_need_the_block_table() -> None:
    planner = MlaPlanner(forced(SPEC, "triton"), shared_prefix_tokens=64)
    with pytest.raises(ValueError, match="block_table must be given where prefixes are shared"):
        planner.plan(torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="at most 64 query rows of a request, got 128"):
        MlaPlanner(forced(MlaSpec(128, 64), "triton"), shared_prefix_tokens=64)
    with pytest.raises(ValueError, match="shared_prefix_requests must be at least 2, got 1"):
        MlaPlanner(forced(SPEC, "triton"), shared_prefix_tokens=64, shared_prefix_requests=1)


@pytest.mark.interpreter
def test_a_plan_is_written_again_by_a_planner_that_shares_prefixes_as_it_does() -> None:
    """Another one would leave the prefixes of the step before, or find none."""
    case = make_case(SPEC, [100, 130], shared_tokens=64)
    planners = [MlaPlanner(forced(SPEC, "triton"), shared_prefix_tokens=x) for x in (64, 0)]
    plans = [planner.plan(case.lengths, case.block_table) for planner in planners]
    with pytest.raises(ValueError, match="a plan without shared prefixes, got one with"):
        planners[1].plan(case.lengths, case.block_table, out=plans[0])
    with pytest.raises(ValueError, match="a plan with shared prefixes, got one without"):
        planners[0].plan(case.lengths, case.block_table, out=plans[1])


@pytest.mark.interpreter
def test_a_plan_with_shared_prefixes_is_for_its_heads() -> None:
    """Its tiles are rows of heads; a plan without them is for any."""
    case, other = make_case(SPEC, [100, 130], shared_tokens=64), MlaSpec(8, 64)
    planners = [MlaPlanner(forced(x, "triton"), shared_prefix_tokens=64) for x in (SPEC, other)]
    plan = planners[0].plan(case.lengths, case.block_table)
    assert plan.prefix is not None and plan.prefix.num_heads == 4
    before = plan.prefix.tiles.clone()
    message = "with shared prefixes must be for 8 heads, got one for 4"
    with pytest.raises(ValueError, match=f"out {message}"):
        planners[1].plan(case.lengths, case.block_table, out=plan)
    assert torch.equal(plan.prefix.tiles, before)
    more = make_case(other, [100, 130], shared_tokens=64)
    cache, out = (more.kv_latent, more.kv_rope), torch.full((2, 1, 8, 512), 7.0).bfloat16()
    options: dict[str, Any] = {"scale": SCALE, "out": out}
    arguments = (more.q_latent, more.q_rope, *cache, more.block_table)
    with pytest.raises(ValueError, match=f"plan {message}"):
        mla_decode(*arguments, plan, planners[1].selection, **options)
    assert (out == 7).all()
    plain = MlaPlanner(forced(SPEC, "triton")).plan(more.lengths)
    got, _ = mla_decode(*arguments, plain, planners[1].selection, **options)
    assert not got.isnan().any() and not (got == 7).all()


def test_caches_in_one_tensor() -> None:
    latent, rope = split_cache(torch.zeros(3, 64, 576), SPEC)
    assert (latent.shape, rope.shape) == ((3, 64, 512), (3, 64, 64))
    with pytest.raises(ValueError, match=r"cache must have shape \[pages, 64, 576\]"):
        split_cache(torch.zeros(3, 64, 656), SPEC)


def test_what_the_tables_choose() -> None:
    """Hopper's path is for bf16 and pages of 16 tokens."""
    hopper = {
        "bf16": (MlaSpec(8, 64), "sm90"),
        "page of 1": (MlaSpec(8, 1), "triton"),
        "fp16": (MlaSpec(8, 64, dtype=torch.float16), "triton"),
    }
    for spec, name in hopper.values():
        assert select_mla_decode(KNOWN_TARGETS["H200"], spec).row(1).name == name
