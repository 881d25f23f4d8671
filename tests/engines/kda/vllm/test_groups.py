"""Layers of several cache groups in one step: metadata and slots of their own, one plan, which
has the lengths of prefills as the host knows them.

vLLM divides a model's KDA layers into groups of caches, each with a block table and metadata of
its own over the same requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

from backend_core.testing.numerics import relative_error
from kda_backend.engines import vllm_step
from kda_backend.engines.vllm import register
from tests.engines.kda.vllm.harness import (
    DRAFT,
    NGRAM,
    bind_cache,
    cache_spec,
    check,
    engine_config,
    hidden,
    run_layers,
    step_metadata,
    table,
)
from tests.engines.kda.vllm.models import MODELS, build, definition_of
from tests.engines.kda.vllm.test_models import TOLERANCE
from tests.engines.vllm_process import builder_of

pytestmark = pytest.mark.usefixtures("in_fp32")
SLOTS = ((3, 5, 7), (2, 9, 4))  # of the three requests, in each group


class Groups:
    """Two layers with the same weights in two groups, and the plans that their steps make."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        model = MODELS[name]
        register()
        self.config = engine_config(flag=True, dtype="float32", **options)
        self.layers = [build(model, self.config, index=index) for index in (0, 1)]
        for layer in self.layers:
            bind_cache(layer, self.config)
        self.definitions = [[definition_of(model) for _ in SLOTS[0]] for _ in self.layers]
        self.built: list[list[int]] = []
        self.known: list[list[int] | None] = []
        upstream = vllm_step.build_step_plan

        def counted(bounds: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.built.append(bounds.tolist())
            host = options["cu_seqlens_cpu"]
            self.known.append(None if host is None else host.tolist())
            return upstream(bounds, *args, **options)

        monkeypatch.setattr(vllm_step, "build_step_plan", counted)

    def step(
        self,
        lengths: Sequence[int],
        computed: Sequence[int],
        tables: Sequence[torch.Tensor],
        accepted: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The step's input, and the output of each layer, whose group has a block table."""
        x = hidden(sum(lengths), seed=sum(computed))
        metadata = [
            step_metadata(layer, self.config, lengths, computed, rows, accepted)
            for layer, rows in zip(self.layers, tables, strict=True)
        ]
        return x, run_layers(self.layers, self.config, x, metadata)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_step_plans_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(name, monkeypatch)
    tables = [table(*slots) for slots in SLOTS]
    for lengths, computed, plans in (
        ((70, 3, 20), (0, 0, 0), [[0, 70, 73, 93]]),
        ((1, 1, 65), (70, 3, 20), [[0, 65]]),  # beside two decodes, which need no plan
        ((5, 66, 2), (71, 4, 85), [[0, 5, 71, 73]]),
        ((66, 5, 2), (76, 70, 87), [[0, 66, 71, 73]]),  # as many requests and tokens as before
    ):
        groups.built.clear()
        groups.known.clear()
        x, outputs = groups.step(lengths, computed, tables)
        assert groups.built == plans
        assert groups.known == plans
        for layer, o, slots, definitions in zip(
            groups.layers, outputs, SLOTS, groups.definitions, strict=True
        ):
            check(layer, o, x, lengths, slots, definitions)


@pytest.mark.parametrize("calls", [[[0, 70, 75]], [[0, 70], [0, 5]]], ids=["one", "two"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_prefills_beside_drafts_plan_once(
    name: str, calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests before and after one that drafts, in one call or two. Their offsets are another
    tensor in each group's metadata."""
    groups = Groups(name, monkeypatch, speculative_config=NGRAM)
    for layer in groups.layers:
        most = 3 if len(calls) == 1 else 2  # chunks of a call
        layer.kda_runtime = replace(layer.kda_runtime, most_chunks=most)
    tables = [
        torch.tensor([[1, 0, 0, 0], [3, 5, 7, 8], [11, 0, 0, 0]], dtype=torch.int32),
        torch.tensor([[10, 0, 0, 0], [2, 9, 4, 6], [11, 0, 0, 0]], dtype=torch.int32),
    ]
    x, _ = groups.step((9,), (0,), [rows[1:2] for rows in tables], (0,))
    for definitions in groups.definitions:
        definitions[1].run(x)
    groups.built.clear()
    groups.known.clear()
    lengths = (70, DRAFT, 5)
    x, outputs = groups.step(lengths, (0, 9, 0), tables, (0, 1, 0))
    assert groups.built == groups.known == calls
    for layer, o, rows, definitions in zip(
        groups.layers, outputs, tables, groups.definitions, strict=True
    ):
        slots = rows[0, 0], rows[1, -1], rows[2, 0]
        for definition, own, out, slot in zip(
            definitions, x.split(lengths), o.split(lengths), slots, strict=True
        ):
            assert relative_error(out, definition.run(own)) < TOLERANCE
            assert relative_error(layer.kv_cache[1][slot], definition.state[0]) < TOLERANCE


def test_a_group_takes_over_what_another_has_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's runner does on a GPU, where upstream's own builder says that it may: the second
    group's metadata is the first one's, with its own slots."""
    upstream = GDNAttentionMetadataBuilder.__init__

    def on_a_gpu(self: Any, *args: Any, **options: Any) -> None:
        upstream(self, *args, **options)
        # upstream's rule but for the device
        self.supports_update_block_table = type(self) is GDNAttentionMetadataBuilder

    monkeypatch.setattr(GDNAttentionMetadataBuilder, "__init__", on_a_gpu)
    groups = Groups("Kimi-Linear", monkeypatch)
    first, second = groups.layers
    rows = [table(*slots) for slots in SLOTS]
    lengths, computed = (70, 3, 20), (0, 0, 0)
    x = hidden(sum(lengths), seed=0)
    built = step_metadata(first, groups.config, lengths, computed, rows[0])
    builder = builder_of(second, groups.config, cache_spec(second, groups.config))
    assert builder.supports_update_block_table
    taken = builder.update_block_table(built, rows[1], torch.zeros(sum(lengths)))
    outputs = run_layers(groups.layers, groups.config, x, [built, taken])
    assert groups.built == [[0, 70, 73, 93]]
    for layer, o, slots, definitions in zip(
        groups.layers, outputs, SLOTS, groups.definitions, strict=True
    ):
        check(layer, o, x, lengths, slots, definitions)
