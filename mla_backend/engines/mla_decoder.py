"""What an engine's MLA layers share on this family: selections, plans and scratch of their decodes.

Imports no engine. An adapter makes an `MlaDecoder` per model at load, a `MlaStep` per step, and
calls it in every layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from backend_core.operator import Selection
from backend_core.target import Target
from mla_backend.api import mla_decode, select_mla_decode
from mla_backend.contract.mla_decode import by_request, split_cache
from mla_backend.decode import MlaRun
from mla_backend.engine_choice import Lead, lead_over
from mla_backend.plan.planner import MAX_TILES, MlaPlanner
from mla_backend.scratch import Scratch
from mla_backend.spec import LATENT_DIM, ROPE_DIM, MlaSpec
from mla_backend.step_plan import StepPlan

HEAD_DIM = LATENT_DIM + ROPE_DIM


@dataclass(frozen=True, eq=False)
class MlaStep:
    """One step's decodes, planned once and shared by the layers.

    Attributes:
        block_table: ``[requests, pages]`` int32.
    """

    selection: Selection[MlaSpec, MlaRun]
    plan: StepPlan
    block_table: torch.Tensor
    scratch: Scratch

    def attend(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        kv_latent: torch.Tensor,
        kv_rope: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's attention.

        Args:
            q_latent: ``[tokens, heads, 512]``; q_rope: ``[tokens, heads, 64]``, request by request.
            kv_latent: ``[pages, page size, 512]``; kv_rope: ``[pages, page size, 64]``.

        Returns:
            (out ``[tokens, heads, 512]``, natural LSE ``[tokens, heads]`` float32).

        Raises:
            ValueError: an input is not as described; nothing has been written then.
        """
        requests = self.plan.requests
        tokens = requests * self.plan.query_tokens
        if q_latent.shape[0] != tokens or q_rope.shape[0] != tokens:
            raise ValueError(
                f"q_latent and q_rope must have {tokens} tokens ({self.plan.query_tokens} for each"
                f" of {requests} requests), got {q_latent.shape[0]} and {q_rope.shape[0]}"
            )
        out, lse = mla_decode(
            by_request(q_latent, requests),
            by_request(q_rope, requests),
            kv_latent,
            kv_rope,
            self.block_table,
            self.plan,
            self.selection,
            scale=scale,
            scratch=self.scratch,
            # the layer's products come between the planner's kernel and this call
            pdl_prefetch_safe=True,
        )
        return out.flatten(0, 1), lse.flatten(0, 1)


class MlaDecoder:
    """The decodes of one model's MLA layers, for the steps in which this family is ahead.

    A plan has tensors of its own for each number of requests, which planning writes anew: a CUDA
    graph that was captured with one of them may be replayed after the next planning.

    Args:
        heads: query heads of this rank; page_size: tokens of a page of the engine's cache.
        kernel: what the engine would run, as `lead_over` knows it.
        query_tokens: the numbers of query tokens per request that a step may have.
        max_requests: the most requests of a step.

    Raises:
        LookupError: no path of the target can serve these layers.
        ValueError: a number is not one that `MlaSpec` takes.
    """

    def __init__(
        self,
        target: Target,
        device: torch.device,
        *,
        heads: int,
        page_size: int,
        kernel: str,
        query_tokens: Iterable[int],
        max_requests: int,
    ) -> None:
        self.device = device
        self._forms: dict[int, tuple[MlaPlanner, int]] = {}
        self._plans: dict[tuple[int, int], StepPlan] = {}
        self._scratch = Scratch(device)
        for tokens in query_tokens:
            lead = lead_over(target, kernel, tokens * heads)
            if isinstance(lead, Lead):
                spec = MlaSpec(heads, page_size, query_tokens=tokens)
                limit = max_requests if lead.covers(max_requests) else lead.max_requests
                assert limit is not None
                self._forms[tokens] = (
                    MlaPlanner(select_mla_decode(target, spec)),
                    min(limit, MAX_TILES),
                )

    def covers(self, requests: int, query_tokens: int) -> bool:
        """Whether a step of so many requests, with so many query tokens each, is served."""
        form = self._forms.get(query_tokens)
        return form is not None and 1 <= requests <= form[1]

    def step(self, lengths: torch.Tensor, block_table: torch.Tensor, query_tokens: int) -> MlaStep:
        """Plan a step that `covers` allows; no host sync.

        Args:
            lengths: ``[requests]`` int32 tokens in the cache, the query's own included; 0 for a
                request that is padding.
            block_table: ``[requests, pages]`` int32.
        """
        planner, _ = self._forms[query_tokens]
        key = (query_tokens, lengths.shape[0])
        plan = self._plans.get(key)
        if plan is not None and plan.lengths.data_ptr() != lengths.data_ptr():
            plan = replace(plan, lengths=lengths)
        self._plans[key] = plan = planner.plan(lengths, out=plan)
        return MlaStep(planner.selection, plan, block_table, self._scratch)

    def warm_up(self) -> None:
        """Compile and load the kernels of every form, and take the memory of the largest step.

        Runs each form on a cache of one page, on the current stream.
        """
        for tokens, (planner, limit) in self._forms.items():
            spec = planner.spec
            for requests in {1, limit}:
                lengths = torch.full((requests,), tokens, dtype=torch.int32, device=self.device)
                table = torch.zeros(requests, 1, dtype=torch.int32, device=self.device)
                cache = torch.zeros(
                    1, spec.page_size, HEAD_DIM, dtype=spec.dtype, device=self.device
                )
                q = cache.new_zeros(requests * tokens, spec.num_heads, HEAD_DIM)
                step = self.step(lengths, table, tokens)
                latent, rope = split_cache(cache, spec)
                step.attend(q[..., :LATENT_DIM], q[..., LATENT_DIM:], latent, rope, 1.0)
        self._plans.clear()
