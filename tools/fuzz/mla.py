"""Random decode steps, against float64."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from backend_core.contracts import interprets
from backend_core.operator import forced
from backend_core.target import Target
from mla_backend.api import mla_decode, select_mla_decode
from mla_backend.launch_params import TABLES
from mla_backend.plan import MlaPlanner
from mla_backend.scratch import SplitScratch
from mla_backend.spec import MlaSpec
from mla_backend.testing.cases import SCALE, MlaCase, expected, make_case
from mla_backend.testing.checks import ALLOWED, LSE_ALLOWED
from tools.fuzz.batches import Draw, FuzzBatch, FuzzCase, MismatchError, output_error, worst

SPECS = {
    "4 heads": MlaSpec(4, 64),
    "16 heads, drafts of 2": MlaSpec(16, 64, query_tokens=2),
    "64 heads, pages of 16": MlaSpec(64, 16),
    "20 heads, drafts of 3, pages of 48": MlaSpec(20, 48, query_tokens=3),
    "fp16, pages of 1": MlaSpec(8, 1, dtype=torch.float16),
}
EDGES = (0, 1, 2, 63, 64, 65, 128, 200)
LONGEST = 400


class _Decode:
    """``mla_decode`` of a few requests, planned by the call or before it."""

    def __init__(self, draw: Draw, target: Target, device: torch.device) -> None:
        self.device = device
        self.spec = spec = SPECS[draw.choice("spec", tuple(SPECS))]
        path = draw.choice("path", select_mla_decode(target, spec).rows)
        # on a GPU of few SMs small inputs have few splits, on one of many several
        target = replace(target, num_sms=draw.choice("SMs", (5, 40, 132)))
        selection = forced(TABLES, target, spec, path)
        count = draw.integer("requests", 1, 6)
        self.lengths = draw.lengths("lengths", count, EDGES, LONGEST)
        self.shared = 0
        kinds = ["balanced", "balanced"]
        if spec.query_rows <= 64 and spec.page_size > 1 and (device.type == "cuda" or interprets()):
            kinds.append("shared prefix")  # which kernels find
        schedule = draw.choice("schedule", kinds)
        options: dict[str, Any] = {}
        if schedule == "shared prefix":
            self.shared = spec.page_size * draw.integer("shared pages", 1, 3)
            self.lengths[0] = max(self.lengths[0], self.shared)
            options = {"shared_prefix_tokens": self.shared}
        self.planner = MlaPlanner(selection, **options)
        self.plans_in_call = draw.chance("planned in the call", 0.5)
        self.causal = draw.chance("causal", 0.8)
        self.sinks = None
        if draw.chance("sinks", 0.3):
            self.sinks = torch.empty(spec.num_heads, device=device)
        self.case = make_case(
            spec, self.lengths, seed=draw.seed(), shared_tokens=self.shared, device=device
        )
        shape = self.case.q_latent.shape
        self.out = torch.empty(shape, dtype=spec.dtype, device=device)
        self.lse = torch.empty(shape[:3], device=device)
        self.scratch = SplitScratch(device)
        self.plan = self.planner.plan(self.case.lengths, self.case.block_table)
        self.last_write = torch.zeros(1, device=device)

    def batch(self) -> FuzzBatch:
        return FuzzBatch(self.fill, self.run, self.error)

    def fill(self, seed: int) -> None:
        lengths = self.lengths
        if not self.shared:  # in another order, which has as many pages
            lengths = random.Random(seed).sample(self.lengths, len(self.lengths))
        drawn = make_case(
            self.spec, lengths, seed=seed, shared_tokens=self.shared, device=self.device
        )
        for name, value in vars(drawn).items():
            if isinstance(value, torch.Tensor):
                getattr(self.case, name).copy_(value)
        if self.sinks is not None:
            rng = torch.Generator(self.device).manual_seed(seed)
            self.sinks.copy_(3.0 * torch.randn(len(self.sinks), generator=rng, device=rng.device))
            self.sinks[0] = -math.inf
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)
        if not self.plans_in_call:
            self.planner.plan(self.case.lengths, self.case.block_table, out=self.plan)
        self.last_write.zero_()  # what lies between the plan and a call that may prefetch it

    def run(self) -> None:
        case: MlaCase = self.case
        if self.plans_in_call:
            self.planner.plan(case.lengths, case.block_table, out=self.plan)
        mla_decode(
            case.q_latent,
            case.q_rope,
            case.kv_latent,
            case.kv_rope,
            case.block_table,
            self.plan,
            self.planner.selection,
            scale=SCALE,
            causal=self.causal,
            sinks=self.sinks,
            out=self.out,
            lse=self.lse,
            scratch=self.scratch,
            pdl_prefetch_safe=not self.plans_in_call,
        )

    def error(self) -> tuple[float, float]:
        want, want_lse = expected(self.case, causal=self.causal, sinks=self.sinks)
        none = want_lse == math.inf
        if not bool((self.lse[none] == math.inf).all()) or bool(self.out[none].any()):
            raise MismatchError("a row without keys must have output 0 and LSE +inf")
        off = (self.lse.double() - want_lse)[~none].abs()
        return worst(
            output_error(self.out, want, ALLOWED),
            (float(off.max()) if off.numel() else 0.0, LSE_ALLOWED),
        )


def decode_case(draw: Draw, target: Target, device: torch.device) -> FuzzBatch:
    """A random step of ``mla_decode``."""
    return _Decode(draw, target, device).batch()


CASES: Mapping[str, FuzzCase] = {"mla_decode": decode_case}
