"""KDA layers inside of a graph, on tables: right for every batch that replays it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation import breakable_cudagraph
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, get_forward_context, set_forward_context
from vllm.v1.worker.gpu import cudagraph_utils

from backend_core.engines import seams
from backend_core.target import KNOWN_TARGETS
from backend_core.testing.numerics import relative_error
from kda_backend.engines import vllm_graphs, vllm_layer, vllm_tables
from kda_backend.engines.vllm import register
from kda_backend.engines.vllm_seams import VLLM_CAPTURE
from kda_backend.engines.vllm_tables import StepTables, run_on, tables_of_pass
from kda_backend.layer_checkpoints import Checkpoints
from tests.engines.kda.sglang.device_graph import DeviceGraph, plan_of_a_gpu
from tests.engines.kda.vllm.harness import SLOTS, bind_cache, engine_config, hidden, step_metadata
from tests.engines.kda.vllm.models import MODELS, build, definition_of
from tests.engines.kda.weights import Definition

TOLERANCE = 2e-2  # activations are bf16 between the projections and the kernels
BUCKET = 160
Batch = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Tokens of each request, and their slots in each cache group."""
FIRST: Batch = (70, 3, 20), ((3, 5, 7), (2, 9, 4))
BATCHES: list[Batch] = [
    FIRST,
    ((150,), ((8,), (6,))),  # the rows after it had requests that began
    ((1, 1, 1, 80, 2), ((7, 8, 3, 5, 10), (4, 6, 2, 9, 10))),  # three that decode beside prefills
    ((1, 1, 1, 30), ((7, 8, 1, 2), (4, 6, 1, 3))),  # the third is a prompt of one token
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An A100's, by Triton's interpreter, with offsets that the host does not know."""
    monkeypatch.setattr(vllm_layer, "detect_target", lambda device: KNOWN_TARGETS["A100"])
    monkeypatch.setattr(vllm_tables, "build_step_plan", plan_of_a_gpu)
    vllm_layer._runtime.cache_clear()
    yield
    vllm_layer._runtime.cache_clear()


class Captured:
    """Layers with the same weights in two cache groups, whose pass on tables is recorded."""

    def __init__(self, config: VllmConfig, name: str = "Kimi-Linear") -> None:
        register()
        self.config, self.graph, model = config, DeviceGraph(), MODELS[name]
        self.layers = [build(model, config, index=index) for index in (0, 1)]
        for layer in self.layers:
            bind_cache(layer, config)
        self.requests: list[dict[int, Definition]] = [{}, {}]
        self.computed: list[dict[int, int]] = [{}, {}]
        self.define = lambda: definition_of(model)
        self.tables = StepTables(self.layers[0].kda_runtime, torch.device("cpu"))
        self.x = torch.zeros(BUCKET, 256, dtype=torch.bfloat16)
        kept = [[pool.clone() for pool in layer.kv_cache] for layer in self.layers]
        dummy = self.metadata(((BUCKET,), ((0,), (0,))))
        self.tables.clear()
        self._pass(dummy)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm_tables, "is_capturing", lambda device: True)
            self.outputs = self.graph.record(lambda: self._pass(dummy))
        for layer, before in zip(self.layers, kept, strict=True):
            assert all(torch.equal(*pools) for pools in zip(layer.kv_cache, before, strict=True))

    def _pass(self, metadata: dict[str, Any]) -> list[torch.Tensor]:
        with torch.no_grad(), self.context(metadata):
            run_on(self.tables)
            positions = torch.zeros(BUCKET, dtype=torch.int64)
            return [layer(hidden_states=self.x, positions=positions) for layer in self.layers]

    def context(self, metadata: dict[str, Any]) -> Any:
        return set_forward_context(metadata, self.config, num_tokens=BUCKET)

    def metadata(self, batch: Batch) -> dict[str, Any]:
        lengths, groups = batch
        found = {}
        for layer, slots, computed in zip(self.layers, groups, self.computed, strict=True):
            table = torch.zeros(len(slots), 4, dtype=torch.int32)
            table[:, 0] = torch.tensor(slots)
            before = [computed.get(slot, 0) for slot in slots]
            found[layer.prefix] = step_metadata(layer, self.config, lengths, before, table)
        return found

    def run(self, batch: Batch, seed: int) -> None:
        """Replay for a batch, and hold outputs, states and windows against the definition."""
        lengths, groups = batch
        x = hidden(sum(lengths), seed=seed)
        self.x[: len(x)] = x
        assert self.tables.fill(self.metadata(batch))
        before = [[pool.clone() for pool in layer.kv_cache] for layer in self.layers]
        self.graph.replay()
        for n, (layer, slots) in enumerate(zip(self.layers, groups, strict=True)):
            requests, o = self.requests[n], self.outputs[n].view(-1, 256)
            for own, out, slot in zip(
                x.split(lengths), o[: len(x)].split(lengths), slots, strict=True
            ):
                request = requests.setdefault(slot, self.define())
                assert relative_error(out, request.run(own)) < TOLERANCE
                assert relative_error(layer.kv_cache[1][slot], request.state[0]) < TOLERANCE
                window = layer.kv_cache[0][slot].T[:, :3]
                assert relative_error(window, request.window) < TOLERANCE
                self.computed[n][slot] = self.computed[n].get(slot, 0) + len(own)
            assert not o[len(x) :].any()
            others = [slot for slot in range(SLOTS) if slot not in slots]
            for pool, was in zip(layer.kv_cache, before[n], strict=True):
                assert torch.equal(pool[others], was[others])


def options(**more: Any) -> dict[str, Any]:
    return {"flag": True, "max_num_seqs": 6, **more}


@pytest.mark.parametrize(
    ("name", "batches"), [("Kimi-Linear", BATCHES), ("GLM-5.3-Flash", [((1, 1, 65), FIRST[1])])]
)
def test_a_graph_serves_other_batches_than_it_was_captured_with(
    name: str, batches: list[Batch], kernels: None
) -> None:
    """More requests and fewer, decodes beside prefills, new and continued, in two groups."""
    captured = Captured(engine_config(**options()), name)
    for number, batch in enumerate(batches):
        captured.run(batch, seed=30 + number)


def test_steps_that_do_not_fit_replay_the_graph_that_breaks(kernels: None) -> None:
    captured = Captured(engine_config(**options(max_num_seqs=2)))
    fits, tables = captured.metadata(((1, 65), ((3, 5), (2, 9)))), captured.tables
    assert tables.rows == 2 and tables.fill(fits)
    assert not tables.fill(captured.metadata(FIRST))  # three requests
    assert not tables.fill(None)  # a dummy pass
    first = next(iter(fits.values()))
    for change in ({"num_prefills": 0}, {"num_spec_decodes": 1}):
        assert not tables.fill({prefix: replace(first, **change) for prefix in fits})


def test_checkpoints_go_to_their_requests_and_are_forgotten(kernels: None) -> None:
    """Rows of all requests, or of the prefills alone, by the release."""
    tables = Captured(engine_config(**options())).tables
    table = torch.full((6, 1), -1, dtype=torch.int32)
    wants = Checkpoints(table[:, 0].clone().fill_(0), table.clone(), table.clone())
    group = replace(tables._groups[0], checkpoints=wants)

    def asked(offsets: list[int], slots: list[int]) -> Any:
        of = SimpleNamespace(
            checkpoint_offsets=torch.tensor(offsets), state_indices=torch.tensor(slots)
        )
        return SimpleNamespace(checkpoint=of)

    for metadata in (asked([0, 0, 128], [0, 0, 7]), asked([0, 128], [0, 7])):
        vllm_tables._fill_checkpoints(group, metadata, 1, 2)
        assert wants.chunks[:, 0].tolist() == [-1, 2, -1, -1, -1, -1]
        assert wants.state_indices[:, 0].tolist() == [-1, 7, -1, -1, -1, -1]
        assert wants.offsets[1] == 128
        vllm_tables._fill_checkpoints(group, SimpleNamespace(checkpoint=None), 0, 1)
        assert wants.chunks.max() == -1 and wants.state_indices.max() == -1


class Model(torch.nn.Module):
    """Whose pass notes whether its layers run on tables."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.passes = layer, []

    def forward(self) -> torch.Tensor:
        context = get_forward_context()
        self.passes.append((context.cudagraph_runtime_mode.name, tables_of_pass() is not None))
        for prefix in context.attn_metadata or ():
            if tables := tables_of_pass():
                tables._group(prefix, context.attn_metadata)
        return torch.zeros(1)


@pytest.mark.skipif(
    seams.difference(VLLM_CAPTURE) is not None, reason="0.32.0's graphs have no key of ours"
)
def test_each_size_is_captured_twice_and_a_step_replays_the_graph_that_fits(
    kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's own manager and wrapper, whose captures and replays run nothing."""
    config = engine_config(**options(enforce_eager=True))
    monkeypatch.setattr(vllm_graphs, "refusal", lambda config: None)
    captured = Captured(config)
    model, (first, second) = Model(captured.layers[0]), captured.layers
    graphs: list[tuple[str, Any]] = []

    def capture(self: Any, entry: Any, args: Any, kwargs: Any) -> Any:
        entry.capture = self.runnable(*args, **kwargs)
        graphs.append(("capture", id(entry)))

    def replay(self: Any, entry: Any, args: Any, kwargs: Any) -> Any:
        graphs.append(("replay", id(entry)))

    monkeypatch.setattr(BreakableCUDAGraphWrapper, "_capture", capture)
    monkeypatch.setattr(BreakableCUDAGraphWrapper, "_replay", replay)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(breakable_cudagraph, "current_platform", platform)
    manager = object.__new__(cudagraph_utils.CudaGraphManager)
    manager.vllm_config, manager.device = config, torch.device("cpu")
    manager.use_breakable_cg, manager.breakable_cg_runner = True, None
    manager.max_num_reqs, manager._graphs_captured = 6, False
    manager.init_breakable_cg_runner(model)

    def step(metadata: Any) -> None:
        with set_forward_context(
            metadata,
            config,
            num_tokens=BUCKET,
            cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE,
            batch_descriptor=BatchDescriptor(num_tokens=BUCKET),
        ):
            manager.run_pw_graph(model, {})

    fits = captured.metadata(FIRST)
    step(fits)
    breaking, whole = (entry for _, entry in graphs)
    assert model.passes == [("PIECEWISE", False), ("NONE", True), ("PIECEWISE", True)]
    assert breaking != whole
    manager._graphs_captured = True
    graphs.clear()
    drafts = {prefix: replace(m, num_spec_decodes=1) for prefix, m in fits.items()}
    for metadata, graph in ((fits, whole), (drafts, breaking), (None, breaking), (fits, whole)):
        step(metadata)
        assert graphs.pop() == ("replay", graph)
    assert {first.prefix, second.prefix} == set(fits)
