"""Builds SageAttention 2, SpargeAttn and FastVideo's ThunderKittens kernel from their sources.

``build`` takes the folders of the peers' repositories, compiles with this machine's nvcc what
attention with D 128 in bf16 on Hopper needs, and lays each library beside a copy of the peer's
Python package in a cache folder. Nothing of theirs is kept in this repository. A library that is
there already for the same sources, flags and torch is not built again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

_HOPPER = ("-gencode", "arch=compute_90a,code=sm_90a", "-O3", "--use_fast_math")
_TORCH = ("-D_GLIBCXX_USE_CXX11_ABI=1", "-DTORCH_API_INCLUDE_EXTENSION_H", "-Xcompiler", "-fPIC")
_SUFFIXES = {".cu", ".cuh", ".cpp", ".h", ".hpp"}

_SPARGE_CALL = """
#include <torch/extension.h>
#include "qattn/qk_int_sv_f8_cuda_sm90.cuh"

// The kernel for D 128, bf16 output, a scale for each block, without a causal mask.
torch::Tensor attend(torch::Tensor q, torch::Tensor k, torch::Tensor v, torch::Tensor out,
                     torch::Tensor lut, torch::Tensor count, torch::Tensor threshold,
                     torch::Tensor q_scale, torch::Tensor k_scale, torch::Tensor v_scale,
                     int layout, int is_causal, int granularity, float scale, int return_count) {
  TORCH_CHECK(layout == 1 && !is_causal && granularity == 1 && !return_count);
  TORCH_CHECK(q.size(3) == 128 && out.scalar_type() == at::ScalarType::BFloat16);
  for (const auto& x : {q, k, v, lut, count, threshold, q_scale, k_scale, v_scale})
    TORCH_CHECK(x.is_cuda() && x.is_contiguous());
  const auto tiles = (q.size(2) + 63) / 64, blocks = (k.size(2) + 127) / 128;
  TORCH_CHECK(out.stride(3) == 1 && v.size(3) >= 128 * blocks && v.size(2) == 128);
  TORCH_CHECK(q_scale.size(2) == tiles && k_scale.size(2) == blocks && lut.size(3) == blocks);
  TORCH_CHECK(lut.size(2) == tiles && count.size(2) == tiles && threshold.size(0) == q.size(1));
  SpargeAttentionSM90Dispatched<64, 128, 128, 128, 1, 1, nv_bfloat16, false, true, false>(
      q.data_ptr<int8_t>(), k.data_ptr<int8_t>(),
      reinterpret_cast<__nv_fp8_e4m3*>(v.data_ptr()),
      reinterpret_cast<nv_bfloat16*>(out.data_ptr()), nullptr, lut.data_ptr<int32_t>(),
      count.data_ptr<int32_t>(), threshold.data_ptr<float>(), q_scale.data_ptr<float>(),
      k_scale.data_ptr<float>(), v_scale.data_ptr<float>(), q.size(0), q.size(2), k.size(2),
      v.size(3), q.size(1), k.size(1), q.stride(0), q.stride(2), q.stride(1), k.stride(0),
      k.stride(2), k.stride(1), v.stride(0), v.stride(1), v.stride(2), out.stride(0),
      out.stride(2), out.stride(1), scale);
  return torch::empty({0});
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("qk_int8_sv_f8_accum_f32_block_sparse_attn_inst_buf_fuse_v_scale_with_pv_threshold_sm90",
        &attend);
}
"""

_STA_BINDING = """
#include <torch/extension.h>

torch::Tensor sta_forward(torch::Tensor q, torch::Tensor k, torch::Tensor v, torch::Tensor out,
                          int t, int h, int w, int text, bool is_text, bool has_text, int canvas);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("sta_fwd", &sta_forward); }
"""


@dataclass(frozen=True)
class Library:
    """A Python extension of a peer.

    Attributes:
        name: of the module.
        sources: translation units, below the peer's folder.
        own: (file name, text) of one that is ours.
        includes: folders below the peer's.
        flags: of nvcc.
    """

    name: str
    sources: tuple[str, ...]
    own: tuple[str, str] | None = None
    includes: tuple[str, ...] = ("csrc",)
    flags: tuple[str, ...] = ("-std=c++17",)


@dataclass(frozen=True)
class Peer:
    """The built parts of a peer.

    Attributes:
        package: its Python package, a folder below its own; the libraries are put there.
        headers: folders below its own whose files decide whether a library is stale.
    """

    package: str
    libraries: tuple[Library, ...]
    headers: tuple[str, ...] = ("csrc",)


_CASSERT = ("-std=c++17", "-include", "cassert")
PEERS = {
    "SageAttention2": Peer(
        "sageattention",
        (
            Library(
                "_qattn_sm90",
                ("csrc/qattn/qk_int_sv_f8_cuda_sm90.cu", "csrc/qattn/pybind_sm90.cpp"),
            ),
            Library("_fused", ("csrc/fused/fused.cu", "csrc/fused/pybind.cpp")),
        ),
    ),
    "SpargeAttn": Peer(
        "spas_sage_attn",
        (
            Library("_qattn", (), ("sparge_call.cu", _SPARGE_CALL), flags=_CASSERT),
            Library("_fused", ("csrc/fused/fused.cu", "csrc/fused/pybind.cpp"), flags=_CASSERT),
        ),
    ),
    "ThunderKittens": Peer(
        "tk_sta",
        (
            Library(
                "fastvideo_sta",
                ("csrc/attention/st_attn_h100.cu",),
                ("sta_binding.cpp", _STA_BINDING),
                ("include", "include/tk/include", "include/tk/prototype", "csrc"),
                (
                    *("-std=c++20", "-DNDEBUG", "-DKITTENS_HOPPER", "-DTORCH_COMPILE"),
                    *("--expt-extended-lambda", "-Xcompiler", "-fno-strict-aliasing"),
                    "--split-compile=0",  # forty kernels in one translation unit
                ),
            ),
        ),
        ("csrc/attention", "include/tk"),
    ),
}


@dataclass(frozen=True)
class Toolkit:
    """A compiler, and the headers and libraries of CUDA, Python and torch."""

    nvcc: Path
    includes: tuple[str, ...]
    libraries: tuple[str, ...]

    @classmethod
    def of_this_machine(cls) -> Toolkit:
        """The toolkit that torch finds.

        Raises:
            RuntimeError: there is none.
        """
        from torch.utils import cpp_extension

        home = cpp_extension.CUDA_HOME
        if home is None or not (Path(home) / "bin" / "nvcc").is_file():
            raise RuntimeError(f"building a peer needs bin/nvcc below CUDA_HOME, which is {home}")
        includes = [*cpp_extension.include_paths("cuda"), sysconfig.get_paths()["include"]]
        libraries = cpp_extension.library_paths("cuda")
        return cls(Path(home) / "bin" / "nvcc", tuple(includes), tuple(libraries))


@dataclass
class _Job:
    """One command that makes one file, and where what it says is kept."""

    command: list[str]
    target: Path

    def run(self, deadline: float) -> None:
        if self.target.is_file():
            return
        unfinished = self.target.with_suffix(".unfinished")
        command = [*self.command, "-o", str(unfinished)]
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise RuntimeError(f"{self.target.name} was not begun, the time for building was over")
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self.target.name} took longer than the {seconds:.0f} s left")  # noqa: B904
        if done.returncode:
            lines = (done.stderr + done.stdout).strip().splitlines()
            told = [x for x in lines if "error" in x.lower() or "cannot find" in x] or lines[-2:]
            raise RuntimeError(f"{self.target.name} was not made: {'; '.join(told[:2])[:400]}")
        unfinished.rename(self.target)


def build(
    folders: dict[str, Path], cache: Path, seconds: float, toolkit: Toolkit | None = None
) -> dict[str, Path | str]:
    """For each peer of ``folders``, by its name in ``PEERS``, the folder to import it from, or one
    sentence that says why it could not be built. Translation units are compiled side by side, and
    what has not ended after ``seconds`` is given up."""
    found: dict[str, Path | str] = {}
    deadline = time.monotonic() + seconds
    try:
        toolkit = toolkit or Toolkit.of_this_machine()
    except (RuntimeError, OSError) as reason:
        return dict.fromkeys(folders, str(reason))
    compiled, homes = {}, {}
    with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        for name, folder in folders.items():
            try:
                _expect_sources(name, folder)
            except ValueError as reason:
                found[name] = str(reason)
                continue
            homes[name] = cache / f"{PEERS[name].package}-{_key(name, folder, toolkit)}"
            jobs = list(_objects(name, folder, homes[name], toolkit))
            compiled[name] = [pool.submit(job.run, deadline) for job in jobs]
    for name, home in homes.items():
        try:
            for job in compiled[name]:
                job.result()
            _link(name, folders[name], home, toolkit, deadline)
            found[name] = home
        except RuntimeError as reason:
            found[name] = str(reason)
    return found


def _expect_sources(name: str, folder: Path) -> None:
    peer = PEERS[name]
    wanted = [source for library in peer.libraries for source in library.sources]
    wanted += [include for library in peer.libraries for include in library.includes]
    if name == "ThunderKittens":
        wanted.append("include/tk/include/kittens.cuh")  # of a submodule that may be empty
    else:
        wanted.append(f"{peer.package}/core.py")
    missing = [path for path in wanted if not (folder / path).exists()]
    if missing:
        raise ValueError(f"the sources of {name} in {folder} lack {', '.join(missing)}")


def _key(name: str, folder: Path, toolkit: Toolkit) -> str:
    """A digest of a build's inputs, as 16 hexadecimal digits."""
    peer = PEERS[name]
    digest = hashlib.sha256(repr((peer, toolkit, torch.__version__)).encode())
    for place in peer.headers:
        for file in sorted((folder / place).rglob("*")):
            if file.suffix in _SUFFIXES:
                digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _objects(name: str, folder: Path, home: Path, toolkit: Toolkit) -> Iterator[_Job]:
    """The compilations of a peer's libraries."""
    for library in PEERS[name].libraries:
        work = home / "objects" / library.name
        work.mkdir(parents=True, exist_ok=True)
        sources = [folder / source for source in library.sources]
        if library.own is not None:
            sources.append(work / library.own[0])
            sources[-1].write_text(library.own[1], encoding="utf-8")
        includes = [str(folder / path) for path in library.includes] + list(toolkit.includes)
        shared = [*_HOPPER, "--expt-relaxed-constexpr", *library.flags, *_TORCH]
        shared += [f"-DTORCH_EXTENSION_NAME={library.name}", *(f"-I{path}" for path in includes)]
        for source in sources:
            yield _Job([str(toolkit.nvcc), *shared, "-c", str(source)], work / f"{source.stem}.o")


def _link(name: str, folder: Path, home: Path, toolkit: Toolkit, deadline: float) -> None:
    """Make the libraries, and copy the peer's Python package around them."""
    peer = PEERS[name]
    package = home / peer.package
    if (folder / peer.package).is_dir():
        keep = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(folder / peer.package, package, ignore=keep, dirs_exist_ok=True)
    else:
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
    driver = home / "objects" / "libcuda.so"  # the driver's library may lie on no linker's path
    empty = home / "objects" / "empty.cpp"
    empty.touch()
    shared = [str(toolkit.nvcc), "-shared", "-Xcompiler", "-fPIC", str(empty)]
    _Job([*shared, "-cudart", "none", "-Xlinker", "-soname=libcuda.so.1"], driver).run(deadline)
    folders = [f"-L{path}" for path in (*toolkit.libraries, driver.parent)]
    libraries = ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda", "torch_python", "cuda")
    for library in peer.libraries:
        objects = sorted(str(x) for x in (home / "objects" / library.name).glob("*.o"))
        command = [str(toolkit.nvcc), "-shared", "-cudart", "shared", *objects, *folders]
        command += ["-Xlinker", "--no-as-needed", *(f"-l{x}" for x in libraries)]
        _Job(command, package / f"{library.name}.so").run(deadline)
