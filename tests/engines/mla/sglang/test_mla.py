"""MLA decodes through sglang's FA3 backend: results, graphs, who serves what, refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from backend_core.engines import sglang_flag
from backend_core.target import KNOWN_TARGETS, Target
from backend_core.testing.numerics import relative_error
from mla_backend.engines import sglang as adapter
from mla_backend.engines import sglang_mla
from mla_backend.engines.sglang_mla import SplitKvAttnBackend
from tests.engines.kda.sglang.device_graph import DeviceGraph
from tests.engines.mla.flash import TARGETS, TOLERANCE
from tests.engines.mla.sglang import flash_attention
from tests.engines.mla.sglang.harness import LAYERS, Server
from tests.mla.beside import run_up_to

H200 = KNOWN_TARGETS["H200"]
LENGTHS = (100, 1, 64, 129, 63)

Serve = Callable[..., Server]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Makes a server on a target where this family is ahead of everything up to a batch."""

    def made(target: Target, most: int | None = None, **options: Any) -> Server:
        monkeypatch.setattr(sglang_mla, "detect_target", lambda device: target)
        run_up_to(monkeypatch, most)
        server = Server(**options)
        server.backend = SplitKvAttnBackend(server.runner, server.upstream)
        return server

    return made


def upstreams(
    server: Server, batch: Any, drawn: dict[str, torch.Tensor], layer: int = 0
) -> torch.Tensor:
    """What sglang's own backend gives, which writes the new tokens too."""
    ours, server.backend = server.backend, server.upstream
    server.backend.init_forward_metadata(batch)
    out = server.run(batch, drawn, layer)
    server.backend = ours
    return out


@pytest.mark.parametrize(("heads", "page_size"), [(2, 64), (16, 32), (5, 128)])
def test_decodes_are_those_of_sglangs_own_backend(
    serve: Serve, target: Target, heads: int, page_size: int
) -> None:
    """FlashAttention's mathematics in float64, over ragged lengths and NaN between them."""
    server = serve(target, heads=heads, page_size=page_size)
    server.fill(LENGTHS)
    batch, drawn = server.batch(), server.draw(len(LENGTHS))
    server.backend.init_forward_metadata(batch)
    out = server.run(batch, drawn)
    assert not flash_attention.calls
    kept = [buffer.clone() for buffer in server.tokens.kv_buffer]
    want = upstreams(server, batch, drawn)
    assert len(flash_attention.calls) == 1
    assert not want.isnan().any()
    for row in range(len(LENGTHS)):
        assert relative_error(out[row], want[row]) < TOLERANCE
    # the new tokens were in the cache before upstream wrote them again
    for before, after in zip(kept, server.tokens.kv_buffer, strict=True):
        assert torch.equal(before, after) or torch.equal(before.isnan(), after.isnan())


def capture(server: Server, size: int) -> tuple[Any, dict[str, torch.Tensor], Any, Any]:
    """A decode step of ``size`` requests as sglang captures it: its batch and what it was called
    with, the graph, and where its layers' outputs are."""
    server.backend.init_cuda_graph_state(size, size)
    server.fill([1] * size)
    batch, drawn = server.batch(size), server.draw(size)
    server.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    server.backend.init_forward_metadata_in_graph(batch)
    graph = DeviceGraph()
    # on a CPU sglang writes the new tokens by what no graph can hold
    outs = graph.record(
        lambda: [server.run(batch, drawn, layer, save=False) for layer in range(LAYERS)]
    )
    assert any("decode" in name for name in graph.kernels)
    return batch, drawn, graph, outs


def replay(server: Server, captured: Any, batch: Any, graph: Any) -> None:
    for name in ("seq_lens", "req_pool_indices", "out_cache_loc", "positions"):
        getattr(captured, name).copy_(getattr(batch, name))
    server.backend.init_forward_metadata_out_graph(captured)
    graph.replay()


def test_a_captured_step_serves_other_lengths_and_fewer_requests(serve: Serve) -> None:
    """As sglang captures and replays: metadata outside of the graph, all layers inside."""
    size = 4
    server = serve(TARGETS["triton"], heads=2)
    captured, drawn, graph, outs = capture(server, size)
    for lengths, seed in (([300, 17, 64, 2], 3), ([130, 500], 4), ([1], 5)):
        server.fill(lengths, seed)
        batch = server.batch(size)
        want = [upstreams(server, batch, drawn, layer) for layer in range(LAYERS)]
        flash_attention.calls.clear()
        replay(server, captured, batch, graph)
        assert not flash_attention.calls
        for layer in range(LAYERS):
            for row in range(len(lengths)):
                assert relative_error(outs[layer][row], want[layer][row]) < TOLERANCE


def test_it_serves_inside_of_sglangs_hybrid_backend(serve: Serve) -> None:
    """Kimi-Linear's: the layers of full attention go to it, with and without a graph."""
    server = serve(TARGETS["torch"])
    ours = server.backend
    linear = MagicMock(needs_cpu_seq_lens=False, extend_dummy_seqs_capped_by_req_pool=False)
    linear.supports_prefill_graph_extend.return_value = False
    server.backend = HybridLinearAttnBackend(ours, linear, list(range(LAYERS)))
    server.backend.init_cuda_graph_state(2, 2)
    for graph in (False, True):
        server.fill([40, 100], seed=int(graph))
        batch, drawn = server.batch(), server.draw(2)
        if graph:
            server.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            server.backend.init_forward_metadata_out_graph(batch)
        else:
            server.backend.init_forward_metadata(batch)
        out = server.run(batch, drawn)
        assert not flash_attention.calls and not linear.forward_decode.called
        assert relative_error(out, upstreams(server, batch, drawn)) < TOLERANCE
        flash_attention.calls.clear()


def test_steps_beyond_the_lead_are_upstreams(serve: Serve) -> None:
    server = serve(TARGETS["torch"], most=2)
    for lengths, calls in ((LENGTHS[:2], 0), (LENGTHS[:3], 1), (LENGTHS[:1], 0)):
        flash_attention.calls.clear()
        server.fill(lengths)
        batch = server.batch()
        server.backend.init_forward_metadata(batch)
        out = server.run(batch, server.draw(len(lengths)))
        assert len(flash_attention.calls) == calls and not out.isnan().any()


def test_prompts_are_upstreams(serve: Serve) -> None:
    """Metadata of a prompt plans nothing, and clears the plan of the step before."""
    server = serve(TARGETS["torch"])
    server.fill(LENGTHS)
    server.backend.init_forward_metadata(server.batch())
    assert server.backend._planned is not None
    batch = server.batch(mode=ForwardMode.EXTEND)
    batch.extend_seq_lens = torch.ones_like(batch.seq_lens)
    batch.extend_prefix_lens = batch.seq_lens - 1
    batch.extend_seq_lens_cpu = [1] * len(LENGTHS)
    batch.extend_prefix_lens_cpu = (batch.seq_lens - 1).tolist()
    batch.extend_num_tokens = len(LENGTHS)
    server.backend.init_forward_metadata(batch)
    assert server.backend._planned is None


def test_tokens_of_no_request_are_upstreams(serve: Serve) -> None:
    server = serve(TARGETS["torch"])
    server.fill([40, 9])
    batch = server.batch()
    server.backend.init_forward_metadata(batch)
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(1, dtype=torch.int64)])
    server.run(batch, server.draw(3))
    assert len(flash_attention.calls) == 1


def test_a_call_that_is_not_the_steps_is_refused(serve: Serve) -> None:
    server = serve(TARGETS["torch"])
    server.fill([40, 9])
    batch = server.batch()
    server.backend.init_forward_metadata(batch)
    server.backend.forward_metadata.cache_seqlens_int32 = torch.tensor([40, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match="must be the lengths that the step was planned for"):
        server.run(batch, server.draw(2))


# the choice


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "detect_target", lambda device: H200)


def chosen(server: Server) -> type | str:
    return adapter.choose(server.runner, server.upstream)


@pytest.mark.parametrize(
    ("heads", "limit", "grids"),
    [
        (4, "of any number of", "1 and more"),
        (16, "of up to 4 and of 32 to 128", "1 to 4"),
        (32, "of up to 4 and of 64 to 128", "1 to 4"),
    ],
)
def test_what_is_served_follows_the_measurement(
    hopper: None, heads: int, limit: str, grids: str, log_lines: list[str]
) -> None:
    assert chosen(Server(heads=heads)) is SplitKvAttnBackend
    assert log_lines[0] == (
        f"kda-dsv4-backend: MLA with {heads} heads per rank on H200 (sm90): decode steps {limit}"
        " requests are planned, run and combined here, where"
        " benchmarks/results/mla_decode_h200.json has them ahead; others and prefills stay"
        " FlashAttentionBackend's"
    )
    row = f"kda-dsv4-backend: mla_decode grid {grids}: sm90 "
    assert sum(line.startswith(row) for line in log_lines) == 1


DRAFTS = "speculative decoding verifies drafts in sglang's calls for prompts"
ONE_RANK = "a request must have its whole cache on one rank"


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("server.runner.is_draft_worker", True, DRAFTS),
        ("adapter.get_spec", lambda: SimpleNamespace(speculative_algorithm="EAGLE"), DRAFTS),
        ("server.upstream.fa_impl_ver", 4, "decode was compared with FlashAttention 3, got 4"),
        (
            "server.upstream.kv_cache_dtype",
            torch.float8_e4m3fn,
            "the cache must be in bfloat16, got float8_e4m3fn: this package reads fp8 caches in"
            " Triton alone, which no result compares with sglang's kernels",
        ),
        (
            "server.runner.model_config.dtype",
            torch.float16,
            "queries must be in bfloat16, got float16",
        ),
        ("server.upstream.attn_cp_size", 2, ONE_RANK),
        ("adapter.get_parallel", lambda: SimpleNamespace(dcp_enabled=True), ONE_RANK),
        (
            "server.upstream.kv_index_translator.is_translating",
            True,
            "pages of the unified memory pool are not served",
        ),
        (
            "server.runner.model.absorbed.1.logit_cap",
            30.0,
            "layers with a cap of the logits or a sliding window are not served",
        ),
        (
            "server.runner.model.absorbed",
            torch.nn.ModuleList(),
            "no layer has a latent head of 512 + 64 channels",
        ),
        (
            "server.runner.model.absorbed.1.tp_q_head_num",
            8,
            "MLA layers must have one number of heads, got [4, 8]",
        ),
        (
            "server.upstream",
            object(),
            "decode is served in the place of FlashAttentionBackend, and sglang chooses object",
        ),
        (
            "adapter.detect_target",
            lambda device: KNOWN_TARGETS["B200"],
            "no result compares mla_decode with fa3 on sm100",
        ),
    ],
)
def test_refused_by_name(
    hopper: None, monkeypatch: pytest.MonkeyPatch, place: str, value: Any, reason: str
) -> None:
    server = Server()
    *path, name = place.split(".")
    owner = functools.reduce(getattr, path, SimpleNamespace(server=server, adapter=adapter))
    monkeypatch.setattr(owner, name, value)
    assert chosen(server) == reason


def test_small_pages_are_refused(hopper: None) -> None:
    reason = "pages must have a multiple of 16 tokens, got 1: --page-size 64 gives such pages"
    assert chosen(Server(page_size=1)) == reason


@pytest.mark.parametrize("family", ["mla", "kda"])
def test_the_flag_puts_the_class_into_the_hybrid_backend(
    hopper: None, family: str, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    """Kimi-Linear under either flag: MLA layers here, whoever serves the others."""
    monkeypatch.setattr(sglang_mla, "detect_target", lambda device: TARGETS["torch"])
    server = Server("--attention-backend", family)
    built = []

    def build(runner: Any, full: Any) -> Any:
        built.append(full)
        return full

    monkeypatch.setattr(
        sglang_flag,
        "_families",
        {name: (claims[:1] if name == "mla" else ()) for name, claims in _families().items()},
    )
    if family == "kda":
        monkeypatch.setattr(sglang_flag, "fallback", lambda reason: None)
    run_up_to(monkeypatch, None)
    backend = sglang_flag.build_backend(build, server.runner, server.upstream)
    assert type(backend) is SplitKvAttnBackend and built == [backend]
    assert isinstance(backend, FlashAttentionBackend)
    assert backend.token_to_kv_pool is server.tokens
    assert (
        "kda-dsv4-backend: MLA layers are served by mla (SplitKvAttnBackend in the place of"
        " FlashAttentionBackend)"
    ) in log_lines


def _families() -> dict[str, Any]:
    from backend_core.engines import entry

    entry.sglang.mla()
    return dict(sglang_flag._families)
