"""DeepSeek-V4's attention through sglang's attention backend: results, who serves what, refusals.

Pool, pages, record writer, layers and the backend's methods are sglang's. Not sglang's are the
lists of rows, which are drawn, and FlashMLA itself, of which no build runs here.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention import flash_mla_interface
from sglang.srt.layers.attention.deepseek_v4_backend import (
    DeepseekV4AttnBackend,
    DSV4AttnMetadata,
)
from sglang.srt.layers.attention.dsv4.sparse_prefill_utils import SparsePrefillKVBuffer
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_v4 import MQALayer
from sglang.srt.runtime_context import publish
from sglang.test.kernels.deepseek_v4.k_cache_reference import (
    quant_to_nope_fp8_rope_bf16_pack_triton,
)

from backend_core.target import Target
from backend_core.testing.numerics import relative_error
from mla_backend import reference_sparse_mla as reference
from mla_backend.engines import sglang as adapter
from mla_backend.engines import sglang_sparse, sparse_layer
from tests.engines.dsv4.sglang.harness import real_pool
from tests.engines.kda.sglang.harness import server_args
from tests.engines.mla.flash import TARGETS, TOLERANCE, FlashMla
from tests.mla.beside import run_as_on_h200

LAYERS = {0: 0, 4: 1, 128: 2, 2: 3, 1: 4}  # a layer of each ratio; 1 and 2 are V4.1's
SLOTS = {0: 512, 4: 192, 128: 30, 2: 500, 1: 1000}  # 0: the window's
ROWS = {0: 96, 4: 40, 128: 12, 2: 60, 1: 70}  # that are written
WIDTH = {4: 512, 128: 64, 2: 512, 1: 512}
FIELDS = {  # of sglang's metadata: lists and lengths
    4: ("c4_sparse_page_indices", "c4_sparse_topk_lengths"),
    128: ("c128_page_indices", "c128_topk_lengths_clamp1"),
    2: ("c2_sparse_page_indices", "c2_sparse_topk_lengths"),
    1: ("c1_sparse_page_indices", "c1_sparse_topk_lengths"),
}


def attention_layer(ratio: int, heads: int) -> Any:
    """sglang's layer, as far as the queries' heads and the sinks go, on rank 1 of several."""
    layer = object.__new__(MQALayer)
    torch.nn.Module.__init__(layer)
    layer.layer_id, layer.compress_ratio = LAYERS[ratio], ratio
    layer.n_local_heads, layer.n_heads = heads, heads * 4
    layer.attn_tp_size, layer.attn_tp_rank = 4, 1
    sinks = torch.randn(heads * 4, generator=torch.Generator().manual_seed(ratio))
    layer.attn_sink = torch.nn.Parameter(2 * sinks, requires_grad=False)
    layer._attn_sink_local = None
    return layer


@functools.cache
def pool() -> tuple[Any, dict[tuple[int, str], torch.Tensor]]:
    """sglang's pool, with records that sglang wrote at drawn slots: those slots by layer."""
    made = real_pool([*LAYERS], kv_source_layers=[LAYERS[2], LAYERS[1]], full_size=1024)
    slots = {}
    generator = torch.Generator().manual_seed(1)
    for ratio, layer in LAYERS.items():
        for what in ("window", "extra") if ratio else ("window",):
            of = 0 if what == "window" else ratio
            count = ROWS[of]
            at = torch.randperm(SLOTS[of], generator=generator)[:count]
            k = (0.1 * torch.randn(count, 512, generator=generator)).bfloat16()
            k[:, :448] *= torch.exp2(torch.arange(7.0) - 3).repeat_interleave(64).bfloat16()
            pack = quant_to_nope_fp8_rope_bf16_pack_triton(k)
            store = made.set_swa_key_buffer_radix if what == "window" else made.set_extra_key_buffer
            store(layer, at, pack)
            slots[layer, what] = at
    return made, slots


@pytest.fixture(autouse=True)
def published() -> None:
    publish(arguments("--chunked-prefill-size", "-1"), role="test")


@functools.cache
def arguments(*options: str) -> Any:
    """As sglang resolves them; the model is another."""
    ngrams = ("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1")
    return server_args(*ngrams, *options)


class Server:
    """sglang's attention backend over the pool, and steps with drawn lists."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.pool, self.slots = pool()
        self.model = torch.nn.ModuleDict({str(r): attention_layer(r, heads) for r in LAYERS})
        backend = object.__new__(DeepseekV4AttnBackend)
        backend.device = torch.device("cpu")
        backend.token_to_kv_pool, backend.mtp_enabled = self.pool, False
        backend.softmax_scale, backend.head_dim_v = 512**-0.5, 512
        backend.is_dsv41, backend._swa_interleaved = False, False
        backend.index_topk, backend.max_context_len = 512, 1024
        backend.dsv4_prefill_backend = None
        backend.sparse_prefill_kv_buffer = SparsePrefillKVBuffer(backend.device)
        backend._flash_mla_with_kvcache = self.kernel = FlashMla()
        self.backend = backend
        self.runner = SimpleNamespace(
            model=self.model,
            model_config=SimpleNamespace(dtype=torch.bfloat16),
            req_to_token_pool=SimpleNamespace(size=4),
            is_draft_worker=False,
        )

    def lists(self, tokens: int, layer: int, what: str, width: int, least: int) -> Any:
        """Slots of written rows for each token, then -1, and how many count."""
        generator = torch.Generator().manual_seed(tokens + width)
        there = self.slots[layer, what]
        indices = torch.full((tokens, width), -1, dtype=torch.int32)
        lengths = torch.zeros(tokens, dtype=torch.int32)
        for token in range(tokens):
            most = min(len(there), width)
            count = int(torch.randint(least, most + 1, (1,), generator=generator))
            chosen = there[torch.randperm(len(there), generator=generator)[:count]]
            indices[token, :count], lengths[token] = chosen.int(), count
        return indices, lengths

    def step(self, ratio: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A decode step of one layer: its output, and what it is in float64."""
        layer = self.model[str(ratio)]
        self.backend.is_dsv41 = ratio in (1, 2)
        window, window_lengths = self.lists(tokens, layer.layer_id, "window", 128, 1)
        core = object.__new__(DSV4AttnMetadata)
        core.swa_page_indices, core.swa_topk_lengths = window, window_lengths
        for named in LAYERS:
            setattr(core, f"c{named}_flashmla_metadata", None)
        extra = None
        if ratio:
            extra = self.lists(tokens, layer.layer_id, "extra", WIDTH[ratio], 0)
            for name, value in zip(FIELDS[ratio], extra, strict=True):
                setattr(core, name, value)
        self.backend.forward_metadata = SimpleNamespace(
            core_attn_metadata=core, late_layer_tail=None, sparse_prefill_cache=None
        )
        q, sinks = self.queries(layer, tokens)
        radix = SimpleNamespace(layer_id=layer.layer_id, tp_q_head_num=self.heads, v_head_dim=512)
        out = self.backend.forward(
            q,
            q,
            q,
            radix,
            SimpleNamespace(forward_mode=ForwardMode.DECODE),
            compress_ratio=ratio,
            save_kv_cache=False,
            attn_sink=sinks,
        )
        named = [(self.read(layer.layer_id, "window"), window, window_lengths)]
        if extra is not None:
            named.append((self.read(layer.layer_id, "extra"), *extra))
        return out, self.expected(q, sinks, named)

    def queries(self, layer: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """With as many heads as sglang's layer pads them to, padding left as it comes."""
        heads = layer._kernel_num_heads(tokens)
        generator = torch.Generator().manual_seed(tokens)
        q = 4 * torch.randn(tokens, heads, 512, generator=generator)
        return q.bfloat16(), layer._local_attn_sink(heads)

    def read(self, layer: int, what: str) -> torch.Tensor:
        """A cache's numbers, ``[slots, 512]`` float64."""
        if what == "window":
            buffer, size = self.pool.get_swa_key_buffer_radix(layer), 256
        else:
            buffer = self.pool.get_extra_key_buffer(layer)
            size = self.pool.get_extra_key_page_size(layer)
        raw = buffer.view(torch.uint8)
        pages = raw.as_strided((raw.shape[0], size, 584), (raw.stride(0), 584, 1))
        return reference.read_records(pages).flatten(0, 1)

    def expected(self, q: torch.Tensor, sinks: torch.Tensor, named: Any) -> torch.Tensor:
        lists = [(rows, indices.unsqueeze(1), lengths) for rows, indices, lengths in named]
        out, _ = reference.sparse_mla(q.unsqueeze(1), lists, 512**-0.5, sinks=sinks)
        return out.squeeze(1)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server on a target where this family is ahead as it is on an H200."""

    def made(target: str, heads: int) -> Server:
        server = Server(heads)
        monkeypatch.setattr(sglang_sparse, "detect_target", lambda device: TARGETS[target])
        run_as_on_h200(monkeypatch)
        monkeypatch.setattr(flash_mla_interface, "flash_mla_sparse_fwd", server.kernel)
        adapter._install(server.backend, server.runner)
        return server

    return made


def check(out: torch.Tensor, want: torch.Tensor) -> None:
    assert out.shape == want.shape
    for token in range(out.shape[0]):
        assert relative_error(out[token], want[token]) < TOLERANCE, token


@pytest.mark.parametrize("ratio", LAYERS)
@pytest.mark.parametrize(("target", "heads"), [("torch", 8), ("torch", 32), ("triton", 16)])
def test_steps_have_their_own_heads(serve: Any, target: str, heads: int, ratio: int) -> None:
    server = serve(target, heads)
    assert server.model[str(ratio)]._kernel_num_heads(5) == heads
    for tokens in (1, 5):
        out, want = server.step(ratio, tokens)
        assert out.shape == (tokens, heads, 512)
        check(out, want)
    assert not server.kernel.calls


@pytest.mark.parametrize(("tokens", "here"), [(16, True), (17, False)])
def test_at_64_heads_the_number_of_query_tokens_decides(
    serve: Any, tokens: int, here: bool
) -> None:
    server = serve("torch", 64)
    assert server.model["4"]._kernel_num_heads(tokens) == 64
    out, want = server.step(4, tokens)
    assert len(server.kernel.calls) == (not here)
    if here:
        check(out, want)


@pytest.mark.parametrize("ratio", FIELDS)
def test_a_graph_serves_other_batches_of_its_size(
    serve: Any, monkeypatch: pytest.MonkeyPatch, ratio: int
) -> None:
    """Captured are the calls with the addresses that they read; other lists come to lie there."""
    server = serve("torch", 8)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    operator = sparse_layer.sparse_mla

    def recorded(*args: Any, **options: Any) -> Any:
        calls.append((operator, args, options))
        return operator(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sparse_layer, "sparse_mla", recorded)
        server.step(ratio, 6)
    ((_, (q, window, _), options),) = calls
    layer = server.model[str(ratio)]
    sinks, extra = options["sinks"], options["extra"]
    for seed in (1, 2):
        q.copy_(4 * torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)))
        named = []
        for what, rows, width in (("window", window, 128), ("extra", extra, WIDTH[ratio])):
            # lists of other lengths, none at all for the last, as a graph is padded
            indices, lengths = server.lists(5 + seed, layer.layer_id, what, width, 0)
            rows.indices.copy_(indices[-6:].unsqueeze(1))
            rows.lengths.copy_(lengths[-6:]).data[-1] = 0
            named.append((server.read(layer.layer_id, what), rows.indices[:, 0], rows.lengths))
        out, _ = operator(*calls[0][1], **options)
        check(out[:, 0], server.expected(q[:, 0], sinks, named))
        assert (out[-1] == 0).all()


def prefill(server: Server, ratio: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """sglang's prefill over rows that it gathers, with lists of gathered rows."""
    layer = server.model[str(ratio)]
    window = server.slots[layer.layer_id, "window"].int()
    extra = server.slots[layer.layer_id, "extra"].int()
    total = len(window) + len(extra)
    generator = torch.Generator().manual_seed(tokens)
    indices = torch.randint(0, total, (tokens, 128), generator=generator, dtype=torch.int32)
    lengths = torch.randint(1, 129, (tokens,), generator=generator, dtype=torch.int32)
    server.backend.forward_metadata = SimpleNamespace(
        sparse_prefill_cache=SimpleNamespace(
            swa_token_ids=window,
            swa_page_size=256,
            layer_inputs=lambda *_: (extra, indices, lengths),
        )
    )
    q, sinks = server.queries(layer, tokens)
    out = server.backend._forward_prefill_sparse(
        q=q.unsqueeze(1),
        layer_id=layer.layer_id,
        compress_ratio=ratio,
        forward_batch=None,
        token_to_kv_pool=server.pool,
        core_attn_metadata=None,
        attn_sink=sinks,
        cos_sin_cache=None,
    )
    rows = torch.cat(
        [
            server.read(layer.layer_id, "extra")[extra.long()],
            server.read(layer.layer_id, "window")[window.long()],
        ]
    )
    return out, server.expected(q, sinks, [(rows, indices, lengths)])


@pytest.mark.parametrize("ratio", FIELDS)
def test_prefills_over_gathered_rows(serve: Any, ratio: int) -> None:
    server = serve("torch", 8)
    out, want = prefill(server, ratio, 4)
    check(out, want)
    assert not server.kernel.calls


def test_at_64_heads_prefills_stay_flashmlas(serve: Any) -> None:
    server = serve("torch", 64)
    prefill(server, 4, 4)
    (call,) = server.kernel.calls
    assert call["q"].shape == (4, 64, 512)


def test_what_runs_where_is_logged_once(serve: Any, log_lines: list[str]) -> None:
    serve("torch", 8)
    lines = [line for line in log_lines if "attention with 8 heads per rank" in line]
    of_ratio = [line.split(" on ")[0].split("over ")[1] for line in lines]
    assert (
        of_ratio[::2]
        == of_ratio[1::2]
        == [
            "pages of 256 rows",
            "pages of 256 and 64 rows",
            "pages of 256 and 2 rows",
            "pages of 256 and 128 rows",
            "pages of 256 and 256 rows",
        ]
    )
    assert all(": decodes run here, where" in line for line in lines[::2])
    assert all(": prefills run here, where" in line for line in lines[1::2])


def test_other_backends_drafts_and_records_are_left_alone(
    serve: Any, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    server = Server(8)
    before = dict(vars(server.backend))
    server.backend._flash_mla_with_kvcache = server.kernel

    class Other(DeepseekV4AttnBackend):
        pass

    server.backend.__class__ = Other
    adapter._install(server.backend, server.runner)
    assert log_lines[-1].endswith("the calls that are served are those of DeepseekV4AttnBackend")
    server.backend.__class__ = DeepseekV4AttnBackend
    server.runner.is_draft_worker = True
    adapter._install(server.backend, server.runner)
    assert log_lines[-1].endswith("the steps of a draft have attention backends of their own")
    assert server.model["0"]._kernel_num_heads(3) == 64
    server.runner.is_draft_worker = False
    monkeypatch.setattr(type(server.pool), "get_swa_key_bytes_per_token", lambda self: 528)
    adapter._install(server.backend, server.runner)
    assert log_lines[-1].endswith(
        "stays DeepseekV4AttnBackend's: records must have 584 bytes, got 528"
    )
    assert vars(server.backend) == before


def test_a_form_without_a_path_leaves_every_layer_as_it_was(
    serve: Any, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    made = sglang_sparse.SparseLayer

    def fails(target: Target, form: Any, *rest: Any) -> Any:
        if form.extra_page_size == 2:  # the second form, after the first was made
            raise LookupError("no path for pages of 2 rows")
        return made(target, form, *rest)

    monkeypatch.setattr(sglang_sparse, "SparseLayer", fails)
    server = serve("torch", 8)
    assert log_lines[-1].endswith("--attention-backend dsv4: no path for pages of 2 rows")
    assert server.backend._flash_mla_with_kvcache is server.kernel
    assert server.model["4"]._kernel_num_heads(3) == 64


def test_the_largest_call_is_what_sglang_resolved(serve: Any) -> None:
    """Of drafts and chunks that nobody named: 12 tokens of four requests, or of a prompt 4,096."""
    layer = serve("torch", 8).model["4"]
    for options, most in ((("--chunked-prefill-size", "-1"), 48), ((), 4096)):
        publish(arguments(*options), role="test")
        server = Server(8)
        form = sglang_sparse._form(server.backend, server.runner, layer, runs_all=True)
        assert form.max_tokens == most


@pytest.mark.parametrize("dim", [288, 528])
def test_compressed_rows_of_another_layout_stay_flashmlas(
    serve: Any, monkeypatch: pytest.MonkeyPatch, log_lines: list[str], dim: int
) -> None:
    of_layer = type(pool()[0]).get_extra_key_bytes_per_token
    monkeypatch.setattr(
        type(pool()[0]),
        "get_extra_key_bytes_per_token",
        lambda self, layer: dim if layer == LAYERS[2] else of_layer(self, layer),
    )
    server = serve("torch", 8)
    assert server.model["2"]._kernel_num_heads(3) == 64
    assert server.model["1"]._kernel_num_heads(3) == 8
    line = f"attention of ratio 2 stays FlashMLA's: records must have 584 bytes, got {dim}"
    assert any(line in said for said in log_lines)


def test_queries_of_another_dtype_stay_upstreams(log_lines: list[str]) -> None:
    server = Server(8)
    server.runner.model_config.dtype = torch.float16
    adapter._install(server.backend, server.runner)
    assert server.backend._flash_mla_with_kvcache is server.kernel
    assert any("queries must be in bfloat16, got torch.float16" in line for line in log_lines)


def test_without_a_measurement_nothing_is_taken_over(log_lines: list[str]) -> None:
    server = Server(8)
    adapter._install(server.backend, server.runner)
    assert server.backend._flash_mla_with_kvcache is server.kernel
    assert any("no result compares sparse_mla" in line for line in log_lines)


@pytest.mark.parametrize("spoiled", [1.0, 1.1])
def test_the_gpu_script_sees_what_ran_and_a_wrong_row(
    serve: Any, monkeypatch: pytest.MonkeyPatch, spoiled: float
) -> None:
    """`benchmarks.engines.dsv4_attention`, with this package's drop-in in FlashMLA's place."""
    from benchmarks.engines.dsv4_attention import AttentionWatch
    from benchmarks.engines.dsv4_sglang_plugin import watch_attention
    from mla_backend.drop_ins import flash_mla

    for name in ("make", "_here_or_there"):
        monkeypatch.setattr(sglang_sparse, name, getattr(sglang_sparse, name))
    decode = sparse_layer.SparseLayer.decode
    monkeypatch.setattr(
        sparse_layer.SparseLayer, "decode", lambda *x, **call: decode(*x, **call).mul_(spoiled)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    watch_attention(sglang_sparse, watch := AttentionWatch())
    made = FlashMla.__call__

    def kernel(self: FlashMla, **call: Any) -> Any:
        made(self, **call)
        return flash_mla.flash_mla_with_kvcache(**call)

    monkeypatch.setattr(FlashMla, "__call__", kernel)
    server = serve("torch", 8)
    server.step(4, 5)
    watch.comparing = True
    server.step(4, 3)
    seen = watch.report()
    assert seen["calls"] == {"decode": {"ours": 2}} and seen["captured"] == {}
    assert seen["rows"]["decode"] == [24 if spoiled == 1.0 else 0, 24]
    (call,) = server.kernel.calls
    assert call["q"].shape == (3, 1, 64, 512)
