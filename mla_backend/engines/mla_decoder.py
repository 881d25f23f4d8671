"""Selections, plans and scratch that an engine's MLA layers share for their decodes.

Imports no engine. An adapter makes an `MlaDecoder` per model at load, a `MlaStep` per step, and
calls it in every layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from backend_core.engines.log import chosen
from backend_core.operator import Selection
from backend_core.target import Target
from mla_backend.api import mla_decode
from mla_backend.beside import Beside, result_file, select_beside, sizes_in_words
from mla_backend.contract.mla_decode import by_request, split_cache
from mla_backend.decode import MlaPath
from mla_backend.plan.planner import MAX_PREFIX_REQUESTS, MAX_TILES, MlaPlanner
from mla_backend.scratch import SplitScratch
from mla_backend.spec import LATENT_DIM, ROPE_DIM, MlaSpec
from mla_backend.step_plan import MlaPlan

HEAD_DIM = LATENT_DIM + ROPE_DIM


def decode_paths(
    target: Target, heads: int, page_size: int, kernel: str, query_tokens: Iterable[int]
) -> Beside[int, MlaSpec]:
    """The paths, by number of requests, of decode steps of each number of query tokens.

    Raises:
        ValueError: a number is not one that `MlaSpec` takes.
    """
    specs = {tokens: MlaSpec(heads, page_size, query_tokens=tokens) for tokens in query_tokens}
    return select_beside("mla_decode", target, specs, kernel)


def describe(paths: Beside[int, MlaSpec], target: Target, heads: int, upstream: str) -> list[str]:
    """Lines for a log: which decode steps run here, and which stay the engine's.

    Args:
        heads: of a rank; upstream: the name of the engine's backend.
    """
    layers, lines = f"MLA with {heads} heads per rank", []

    def steps(tokens: int) -> str:
        return "" if tokens == 1 else f" with {tokens} query tokens each"

    for tokens, selection in paths.served.items():
        what = (
            f"decode steps of {sizes_in_words(selection)} requests{steps(tokens)} are planned, run"
            f" and combined here, where {result_file(selection)} has them ahead; others and"
            f" prefills stay {upstream}'s"
        )
        lines += chosen(layers, target, what, selection.explained)
    for tokens, why in paths.refused.items():
        lines += chosen(layers, target, f"decode steps{steps(tokens)} stay {upstream}'s: {why}")
    return lines


@dataclass(frozen=True, eq=False)
class MlaStep:
    """One step's decodes, planned once and shared by the layers.

    Attributes:
        block_table: ``[requests, pages]`` int32.
    """

    selection: Selection[MlaSpec, MlaPath]
    plan: MlaPlan
    block_table: torch.Tensor
    scratch: SplitScratch

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
        kernel: what the engine would run, as the path tables name it.
        query_tokens: the numbers of query tokens per request that a step may have.
        max_requests: the most requests of a step.

    Raises:
        LookupError: no step runs here.
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
        self.paths = decode_paths(target, heads, page_size, kernel, query_tokens)
        if not self.paths.served:
            raise LookupError(self.paths.why)
        self._most = min(max_requests, MAX_TILES)
        self._plans: dict[tuple[int, int], tuple[MlaPlanner, MlaPlan | None]] = {}
        self._scratch = SplitScratch(device)

    def covers(self, requests: int, query_tokens: int) -> bool:
        """Whether a step of so many requests, with so many query tokens each, is served."""
        return 1 <= requests <= self._most and self.paths.covers(query_tokens, requests)

    def step(self, lengths: torch.Tensor, block_table: torch.Tensor, query_tokens: int) -> MlaStep:
        """Plan a step that `covers` allows; no host sync.

        Args:
            lengths: ``[requests]`` int32 tokens in the cache, the query's own included; 0 for a
                request that is padding.
            block_table: ``[requests, pages]`` int32.
        """
        key = (query_tokens, lengths.shape[0])
        planner, plan = self._plans.get(key) or (self._planner(*key), None)
        if plan is not None and plan.lengths.data_ptr() != lengths.data_ptr():
            plan = replace(plan, lengths=lengths)
        plan = planner.plan(lengths, block_table, out=plan)
        self._plans[key] = planner, plan
        return MlaStep(planner.selection, plan, block_table, self._scratch)

    def _planner(self, query_tokens: int, requests: int) -> MlaPlanner:
        """The planner of every step of so many requests, which looks for shared prompts or not."""
        selection = self.paths.served[query_tokens]
        params = selection.row(requests).params
        least = getattr(params, "shared_requests", 0)
        if not (least and least <= requests <= MAX_PREFIX_REQUESTS):
            return MlaPlanner(selection)
        return MlaPlanner(
            selection,
            shared_prefix_tokens=params.shared_tokens,
            shared_prefix_requests=least,
        )

    def warm_up(self) -> None:
        """Compile and load the kernels of every kind of step, and take the memory of the largest.

        Runs each on a cache of one page, on the current stream.
        """
        for tokens, selection in self.paths.served.items():
            spec = selection.spec
            # the search for shared prompts is compiled for powers of two
            searched = (2**power for power in range(1, MAX_PREFIX_REQUESTS.bit_length()))
            ends = (most or self._most for _, most in selection.sizes)
            for requests in {1, *searched, *ends, self._most}:
                if not self.covers(requests, tokens):
                    continue
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
