"""The CUDA kernels compiled by NVRTC, as on a user's machine: nvcc takes what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend_core.launch import cuda
from backend_core.launch.cuda_params import CudaParams
from tests.core.evidence import ROOT
from tests.kda import test_cuda_compile as kda
from tests.mla import test_cuda_compile as mla

try:
    LIBRARY = cuda._nvrtc()
except ImportError as reason:
    pytest.skip(str(reason), allow_module_level=True)


def kernels() -> dict[str, Any]:
    """(source, params, defines) of the first variant that the compile reports have of each."""
    found: dict[str, Any] = {}
    named = (*kda.prefill_variants(), *kda.one_launch_variants(), *mla.variants().items())
    step = kda.step_variant(1, 4, next(iter(kda.STEPS)))
    records = kda.records_variant(1)
    for variant in (step, records, *(variant for _, variant in named)):
        found.setdefault(str(variant[0].relative_to(ROOT)), variant)
    return found


def compiled(source: Path, text: bytes, params: CudaParams, defines: dict[str, int]) -> bytes:
    options = ["--gpu-architecture=sm_90a", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    options += [f"--include-path={folder}" for folder in (source.parent, cuda.HEADERS)]
    return cuda._compile(LIBRARY, text, source.name, params.header, tuple(options))


def test_every_source_is_here() -> None:
    files = {str(file.relative_to(ROOT)) for file in ROOT.glob("*_backend/kernels/**/*.cu")}
    assert set(kernels()) == files


@pytest.mark.parametrize("name", kernels())
def test_it_compiles(name: str) -> None:
    source, params, defines = kernels()[name]
    image = compiled(source, source.read_bytes(), params, dict(defines))
    assert cuda.shared_bytes_of(image) >= 0


def test_a_constant_named_like_a_label_is_refused() -> None:
    """NVRTC makes a symbol of it, which nvcc does not."""
    source, params, defines = kernels()["mla_backend/kernels/sm90/mla_decode.cu"]
    text = source.read_bytes() + b"\nstatic constexpr u32 TRY_WAIT_DONE = 1;\n"
    with pytest.raises(RuntimeError, match="Label expected"):
        compiled(source, text, params, dict(defines))
