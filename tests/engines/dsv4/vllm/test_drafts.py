"""Speculative decoding (MTP): several tokens per request in a decode step, of which some are wrong.

A step's first token of a request is right, then come drafts: the accepted ones are right, behind
them wrong ones. The next step starts behind the last accepted token.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from backend_core.engines import entry
from dsv4_backend import reference
from dsv4_backend.engines.vllm_compressor import FusedCompressor
from tests.dsv4.cases import make_history
from tests.engines.dsv4.vllm.harness import Step, build, engine_config
from tests.engines.dsv4.vllm.test_compressor import check

entry.vllm.dsv4()
DRAFTS = 3
CASES = [
    ("fp8_ds_mla", 4, [29, 40, 17]),
    ("indexer_fp8", 4, [29, 40, 17]),
    ("indexer_mxfp4", 4, [29, 40, 17]),
    ("fp8_ds_mla", 128, [150, 270]),
]
PROMPTS = {4: [5, 11, 2], 128: [121, 249]}


class Run:
    """Prompts, then decode steps with drafts or without, until every request has all its tokens."""

    def __init__(self, cache_format: str, ratio: int, lengths: list[int], drafts: int) -> None:
        self.config = engine_config(flag=True, drafts=drafts)
        compressor = build(self.config, cache_format, ratio)
        assert type(compressor) is FusedCompressor
        self.drafts, self.lengths = drafts, lengths
        self.step = Step(compressor, cache_format, lengths)
        spec = self.step.layer.spec
        self.histories = [make_history(spec, n, seed) for seed, n in enumerate(lengths)]
        self.wrong = [make_history(spec, n, 100 + seed) for seed, n in enumerate(lengths)]
        self.places = [0] * len(lengths)
        self.rng = random.Random(7)
        self.rejected = 0

    def prompts(self) -> None:
        ends = PROMPTS[self.step.layer.spec.compress_ratio]
        self.step.run(self.config, self.histories, [(r, 0, n) for r, n in enumerate(ends)])
        self.places = list(ends)

    def decode(self) -> Any:
        """One step of every request that has tokens left; returns its state metadata."""
        chunks, drafted = [], list(self.histories)
        for request, place in enumerate(self.places):
            left = self.lengths[request] - place
            if not left:
                continue
            drafts = min(self.drafts, left - 1)
            accepted = self.rng.randint(0, drafts)
            right, end = place + 1 + accepted, place + 1 + drafts
            rows = [self.histories[request][:right], self.wrong[request][right:]]
            drafted[request] = torch.cat(rows)
            chunks.append((request, place, end))
            self.places[request] = right
            self.rejected += end - right
        self.rng.shuffle(chunks)
        return self.step.run(self.config, drafted, chunks)

    def unfinished(self) -> bool:
        return self.places != self.lengths

    def visible(self) -> list[torch.Tensor]:
        """Of each request the state rows and records up to its last accepted token."""
        engine, spec = self.step.caches, self.step.layer.spec
        seen = []
        for request, end in enumerate(self.places):
            rows = [engine.state[engine.locate(request, p)] for p in range(end)]
            seen.append(torch.stack(rows))
            slots = engine.slot_of[request, : end // spec.compress_ratio]
            if len(slots):
                seen += list(reference.load(engine.caches, slots, spec))
        return seen


@pytest.mark.parametrize(("cache_format", "ratio", "lengths"), CASES)
def test_rejected_drafts_leave_no_trace_in_what_later_tokens_see(
    cache_format: str, ratio: int, lengths: list[int]
) -> None:
    plain, drafted = (Run(cache_format, ratio, lengths, drafts) for drafts in (0, DRAFTS))
    for run in (plain, drafted):
        run.prompts()
    while plain.unfinished():
        plain.decode()
    while drafted.unfinished():
        drafted.decode()
        plain.places = drafted.places
        for ours, wanted in zip(drafted.visible(), plain.visible(), strict=True):
            assert torch.equal(ours, wanted)
    assert not plain.rejected and drafted.rejected > 10
    check(drafted.step, drafted.histories)  # the definition, and nothing else was written
