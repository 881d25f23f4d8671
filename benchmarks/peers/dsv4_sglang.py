"""sglang 0.5.23's compressor step (``c4_v2``, ``c128_v2``, ``fused_norm_rope_v2``) and its layout,
and what its attention backend runs on Hopper of DeepSeek-V4.1's compressors.

``source`` is an installed site-packages or a copy of ``sglang/kernels/jit`` and
``sglang/kernels/ops/attention/dsv4`` with their headers. sglang's Python is imported from there;
its sources are compiled here by nvcc, with sglang's flags, and loaded with tvm-ffi. V4.1 also needs
``sglang/kernels/ops`` and ``sglang/srt``, of whose large modules single classes are taken.
"""

from __future__ import annotations
import __future__

import ast
import concurrent.futures
import dataclasses
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.sources import packages, stub
from dsv4_backend import CompressorLayer, RingDecode, RingPrefill
from dsv4_backend.testing.engine import make_spec
from dsv4_backend.testing.steps import PAGE_TOKENS, TimedStep, TimedV41, rope_table

RELEASE = "0.5.23"
SWA_PAGE = 256
"""Tokens in a page of sglang's sliding window, whose last rows its prefill plan keeps too."""

_PACKAGES = (
    *("sglang.kernels.jit.utils.compile", "sglang.kernels.ops.attention.dsv4"),
    "sglang.srt.layers.attention.dsa",
)
_FFI = "container/tensor.h dtype.h error.h extra/c_env_api.h function.h"


def load(source: Path, arch: str = "90a") -> types.ModuleType:
    """sglang's ``kernels/ops/attention/dsv4/compress.py``, with its modules compiled.

    Raises:
        ImportError: a file or tvm-ffi is missing.
        RuntimeError: nvcc refuses a source; the message holds what it said.
    """
    _prepare(source, arch)
    compress = importlib.import_module("sglang.kernels.ops.attention.dsv4.compress")
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        for job in [pool.submit(make, *of) for make, of in _modules(compress)]:
            job.result()
    return compress


def _prepare(source: Path, arch: str) -> None:
    packages(source, *_PACKAGES)
    common = importlib.import_module("sglang.kernels.jit.utils.common")
    cpp_args = importlib.import_module("sglang.kernels.jit.utils.compile.cpp_args")
    utils: Any = sys.modules["sglang.kernels.jit.utils"]
    utils.cache_once, utils.make_cpp_args = common.cache_once, cpp_args.make_cpp_args
    utils.is_arch_support_pdl, utils.is_hip_runtime = lambda: True, lambda: False
    jit = source / "sglang/kernels/jit"
    utils.load_jit = lambda *names, **files: _load_module(compile_module(jit, arch, names, **files))
    no = dict.fromkeys(("is_gfx95_supported", "is_hip", "is_xpu"), lambda: False)
    stub("sglang.srt.utils", **no)
    stub(
        "sglang.srt.layers.attention.dsa.utils",
        INDEXER_K_CACHE_PRESHUFFLE_TILE=16,
        aiter_can_use_preshuffle_paged_mqa=lambda: False,
    )


def load_v41(source: Path, arch: str = "90a") -> types.SimpleNamespace:
    """What `v41_step` needs of sglang.

    Raises:
        ImportError: a file or tvm-ffi is missing.
    """
    _prepare(source, arch)
    ops = [
        f"sglang.kernels.ops.{name}" for name in ("gemm", "kvcache", "layernorm", "quantization")
    ]
    packages(source, *ops, "sglang.srt.layers.attention.dsv4")
    utils: Any = sys.modules["sglang.kernels.jit.utils"]
    utils.get_jit_cuda_arch = lambda: types.SimpleNamespace(major=int(arch.rstrip("af")) // 10)
    utils.aligned_new_empty = None
    vars(sys.modules["sglang.srt.utils"])["add_prefix"] = None
    stub("sglang.kernels.kernel_api_logging", debug_kernel_api=lambda function: function)
    custom_op = {"register_custom_op": lambda **_: lambda function: function}
    stub("sglang.srt.utils.custom_op", **custom_op)
    platform = types.SimpleNamespace(is_blackwell=False)
    stub("sglang.srt.runtime_context", get_platform=lambda: platform)
    stub("sglang.kernels.ops.attention.deep_select", get_input_stride_alignment_bytes=None)
    stub("sglang.kernels.ops.gemm.bf16_fp32", linear_bf16_fp32=None)
    stub("sglang.kernels.ops.gemm.router_gemv_hip", rocm_gemv_split_k_max_tokens=None)
    stub("sglang.srt.layers.linear", ReplicatedLinear=torch.nn.Linear)
    stub("sglang.srt.layers.quantization.base_config", QuantizationConfig=object)
    sparse = importlib.import_module("sglang.srt.layers.attention.dsv4.dsv41_sparse")
    srt = source / "sglang/srt"
    states = _classes(
        srt / "mem_cache/deepseek_v4_compress_state.py",
        {"KVAndScore": None, "CompressStatePool": _STATE_METHODS},
    )
    given = vars(sparse) | states | {"is_sm100_or_newer": lambda: False}
    backend = _classes(
        srt / "layers/attention/deepseek_v4_backend.py",
        {"DeepseekV4AttnBackend": _V41_METHODS},
        given,
    )
    return types.SimpleNamespace(
        sparse=sparse,
        **states,
        **backend,
        attn=importlib.import_module("sglang.kernels.ops.attention.dsv4.attn"),
        keys=importlib.import_module("sglang.kernels.ops.kvcache.dsv4_fp4_index_k_cache"),
    )


_STATE_METHODS = (
    *("translate_from_req_position_to_state_loc", "get_state_by_state_loc"),
    "set_state_by_state_loc",
)
_V41_METHODS = (
    *("_low_ratio_compress_decode", "_low_ratio_compress_torch", "_low_ratio_pair_partners"),
    "_low_ratio_write_group",
)


def _classes(
    file: Path, wanted: dict[str, tuple[str, ...] | None], given: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Classes of a module whose imports are not needed, with some of their methods or all.

    Raises:
        ImportError: one of them is not in the file.
    """
    body: list[ast.stmt] = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in wanted:
            methods = wanted[node.name]
            if methods is not None:
                node.bases, node.keywords, node.decorator_list = [], [], []
                node.body = [x for x in node.body if getattr(x, "name", None) in methods]
                if len(node.body) < len(methods):
                    raise ImportError(f"{file} has not all of {methods}")
            body.append(node)
    if len(body) < len(wanted):
        raise ImportError(f"{file} has not all of {sorted(wanted)}")
    flags = __future__.annotations.compiler_flag
    code = compile(ast.Module(body, []), str(file), "exec", flags=flags)
    scope: dict[str, Any] = {"torch": torch, "dataclasses": dataclasses, **(given or {})}
    scope["__name__"] = f"sglang_{file.stem}"
    exec(code, scope)
    return {name: scope[name] for name in wanted}


def _modules(compress: types.ModuleType) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The modules that the steps here use, as sglang's own calls ask for them."""
    kinds = ((512, 4), (128, 4), (512, 128))
    fp32, v4 = torch.float32, compress.KVLayout.V4
    pool, finish = compress._jit_compress_module, compress._jit_compress_norm_rope_module
    found = [(pool, (d, fp32, fp32, fp32, ratio)) for d, ratio in kinds]
    return found + [(finish, (fp32, d, 64, PAGE_TOKENS, False, v4, False)) for d in (128, 512)]


def compile_module(
    jit: Path,
    arch: str,
    names: tuple[str, ...],
    cuda_files: list[str],
    cuda_wrappers: list[tuple[str, str]],
    extra_cuda_cflags: list[str] | None = None,
) -> Path:
    """The shared library of an sglang module, compiled by its flags once."""
    ffi = Path(importlib.import_module("tvm_ffi.libinfo").find_include_path())
    library = Path(importlib.import_module("tvm_ffi.libinfo").find_libtvm_ffi())
    lines = [f"#include <tvm/ffi/{name}>" for name in _FFI.split()]
    lines += [f'#include "{jit / "csrc" / name}"' for name in cuda_files]
    lines += ["namespace sglang {"]
    lines += [f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, ({of}));" for name, of in cuda_wrappers]
    text = "\n".join([*lines, "}", ""])
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", *(extra_cuda_cflags or [])]
    flags += [f"-DSGL_CUDA_ARCH={arch.rstrip('af')}0"]
    flags += [f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xcompiler", "-fPIC", "-shared"]
    flags += [f"-I{jit / 'include'}", f"-I{ffi}", f"-L{library.parent}", "-ltvm_ffi"]
    digest = hashlib.sha256("\n".join([text, *flags]).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"sglang_jit-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    built = folder / f"{digest}.so"
    if not built.exists():
        main, part = folder / f"{digest}-{os.getpid()}.cu", folder / f"{digest}-{os.getpid()}.so"
        main.write_text(text)
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        command = [nvcc, *flags, str(main), "-o", str(part)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"nvcc refused {'_'.join(names)}: {ended.stderr[-2000:]}")
        part.replace(built)
    return built


def _load_module(library: Path) -> Any:
    return importlib.import_module("tvm_ffi").load_module(str(library))


def ring_step(kind: str, phase: str, n: int, ends: str, device: torch.device) -> TimedStep:
    """A step on sglang's layout, by its rounding; the indexer rotates.

    Args:
        kind: indexer, main_c4 or main_c128.
        phase: decode, ``n`` requests of 4k to 8k tokens; or prefill, one request of ``n`` tokens.
        ends: of decode: ``all`` requests end a window, or as their lengths say (``mixed``).
    """
    ratio = 128 if kind == "main_c128" else 4
    spec = make_spec(
        "indexer_fp8" if kind == "indexer" else "fp8_ds_mla",
        ratio,
        page_tokens=PAGE_TOKENS,
        rotate=kind == "indexer",
        rounding="sglang",
    )
    generator = torch.Generator(device).manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    table = torch.stack(rope_table(device).chunk(2, 1), -1).flatten(1).contiguous()
    ape, weight = normal(ratio, spec.halves, spec.head_dim), 1 + 0.1 * normal(spec.head_dim)
    # sglang keeps [halves, ratio, d]; this is a view of it
    ape = ape.transpose(0, 1).contiguous().transpose(0, 1)
    layer = CompressorLayer(spec, ape, weight, table)
    plan: RingDecode | RingPrefill
    if phase == "decode":
        positions = torch.randint(4096, 8192, (n,), generator=generator, device=device)
        if ends == "all":
            positions = positions // ratio * ratio + ratio - 1
        page = spec.halves * torch.arange(n, device=device)
        own, past = (page + p // ratio % spec.halves for p in (positions, positions - ratio))
        row = own * ratio + positions % ratio
        entries = torch.stack((positions + 1, row, past, own), 1).int()
        slots = torch.randperm(n, generator=generator, device=device)
        plan = RingDecode(entries, slots, pdl_prefetch_safe=True)
        pages, count = n * spec.halves, int(((positions + 1) % ratio == 0).sum())
    else:
        plan, pages = _prefill_plan(spec.window, ratio, n, generator, device)
        count = n // ratio
    state = normal(pages, ratio, spec.row_width)
    # sglang's pages are as far apart as their bytes, the main cache's rounded up to 576
    stride = spec.page_bytes if kind == "indexer" else -(-spec.page_bytes // 576) * 576
    records = n if phase == "decode" else count
    shape = (records // PAGE_TOKENS + 1, stride)
    cache = torch.zeros(shape, dtype=torch.uint8, device=device)
    return TimedStep(layer, normal(n, spec.row_width), state, cache, plan, count)


def _prefill_plan(
    window: int, ratio: int, n: int, generator: torch.Generator, device: torch.device
) -> tuple[RingPrefill, int]:
    """sglang's plan v2 of one request from its first token on, and the pages of its states."""
    seq_lens = torch.arange(ratio, n + 1, ratio, device=device)
    # the rows before the first token count as rows of the state
    packed = (seq_lens - 1) | ((window - seq_lens).clamp_(min=0) << 16)
    pages = torch.arange(2, device=device).expand(len(seq_lens), 2)
    windows = torch.cat((seq_lens[:, None], packed[:, None], pages), 1).int()
    tokens = torch.arange(n, device=device)
    kept = tokens >= n // ratio * ratio - (ratio if window > ratio else 0)
    if window > ratio:
        kept |= tokens % SWA_PAGE >= SWA_PAGE - ratio
    last = tokens[kept]
    writes = torch.stack((last, last // SWA_PAGE * window + last % window), 1).int()
    slots = torch.zeros(n, dtype=torch.int64, device=device)
    slots[seq_lens - 1] = torch.randperm(len(seq_lens), generator=generator, device=device)
    state_pages = (n // SWA_PAGE + 1) * window // ratio
    return RingPrefill(windows, writes, slots), max(2, state_pages)


def upstream_step(compress: types.ModuleType, part: TimedStep) -> Callable[[], None]:
    """sglang's two calls, pool and finish, on these tensors, as its backend makes them."""
    spec, plan, layer = part.layer.spec, part.step_plan, part.layer
    theirs: Any
    if isinstance(plan, RingDecode):
        theirs = compress.CompressorDecodePlan(spec.compress_ratio, _bytes(plan.entries))
    else:
        assert isinstance(plan, RingPrefill)
        windows, writes = _bytes(plan.windows), _bytes(plan.writes)
        theirs = compress.CompressorPrefillPlan(spec.compress_ratio, windows, writes)
    ape = layer.ape.transpose(0, 1).reshape(-1, spec.head_dim)
    freqs = torch.view_as_complex(layer.rope_table.view(-1, 32, 2))

    def step() -> None:
        pooled = compress.compress_forward(
            kv_score_buffer=part.state,
            kv_score_input=part.kv_score,
            ape=ape,
            plan=theirs,
            compress_ratio=spec.compress_ratio,
            head_dim=spec.head_dim,
        )
        compress.compress_norm_rope_store(
            pooled,
            theirs,
            norm_weight=layer.norm_weight,
            norm_eps=spec.eps,
            freq_cis=freqs,
            out_loc=plan.slots,
            kvcache=part.cache,
            page_size=spec.page_tokens,
        )

    return step


def v41_step(sglang: types.SimpleNamespace, part: TimedV41) -> Callable[[], None]:
    """sglang's step of a V4.1 source layer behind its projections, on these tensors, as its
    attention backend makes it on Hopper."""
    call, plan = part.call, part.step_plan
    layer, spec, device = call.layer, call.layer.spec, call.kv_score.device
    ratio, sparse = spec.compress_ratio, sglang.sparse

    def norm(weight: torch.Tensor) -> Any:
        module = sparse.RMSNorm(weight.shape[0], spec.eps).to(device, torch.bfloat16)
        module.weight.data.copy_(weight)
        return module

    compressor = sparse.DeepseekV41Compressor(1, 512, ratio, spec.eps, fused_compress=False)
    compressor.norm = norm(layer.norm_weight)
    compressor.project = lambda x: (call.kv_score, call.score)
    indexer = object.__new__(sparse.DeepseekV41Indexer)
    torch.nn.Module.__init__(indexer)
    indexer.owns_k, indexer.index_head_dim, indexer.rope_head_dim = True, 128, 64
    indexer.k_norm = norm(layer.key_norm_weight)
    indexer.wk = torch.nn.Linear(512, 128, bias=False, dtype=torch.bfloat16, device=device)
    indexer.wk.weight.data.copy_(layer.key_projection)
    pool = types.SimpleNamespace(
        get_extra_key_layout=lambda _: types.SimpleNamespace(is_fp4=False),
        set_index_k_fp4=lambda layer_id, loc, cache_k: sglang.keys.store_fp4_index_k_cache(
            cache_k, call.index_cache, loc, page_size=spec.index.page_tokens, rne=True
        ),
        set_extra_key_buffer_fused=lambda layer_id, loc, cache_k: sglang.attn.fused_store_cache(
            cache_k, call.cache, loc, page_size=spec.main.page_tokens, type="flashmla"
        ),
    )
    if call.state is not None:
        rings, ring_rows, width = call.state.shape  # and the rows behind them, which are nobody's
        rows = call.state.as_strided(((rings + 1) * ring_rows, width), (width, 1))
        states = object.__new__(sglang.CompressStatePool)
        states.ring_size, states.kv_score_buffer = ring_rows, sglang.KVAndScore(rows)
        pool.get_attention_compress_states = lambda _: states
    backend = object.__new__(sglang.DeepseekV4AttnBackend)
    backend.token_to_kv_pool = pool
    raw = torch.ones_like(plan.slots) if plan.state_slots is None else plan.state_slots
    core = types.SimpleNamespace(raw_out_loc=raw, c1_out_loc=plan.slots, c2_out_loc=plan.slots)
    backend.forward_metadata = types.SimpleNamespace(core_metadata=core)
    attention = types.SimpleNamespace(
        layer_id=0,
        compress_ratio=ratio,
        compressor=compressor,
        indexer=indexer,
        rope_head_dim=64,
        freqs_cis=torch.view_as_complex(layer.rope_table.view(-1, 32, 2)),
    )
    x, requests = torch.empty(plan.num_tokens, 1, device=device), plan.requests
    step = backend._low_ratio_compress_torch
    if plan.longest == 1:
        step = backend._low_ratio_compress_decode

    @torch.no_grad()
    def run() -> None:
        step(attention, x, requests, plan.positions)

    return run


def _bytes(entries: torch.Tensor) -> torch.Tensor:
    return entries.contiguous().view(torch.uint8)
