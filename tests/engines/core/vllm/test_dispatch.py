"""The flag in vLLM whatever the families: one choice for each layer, on every platform."""

from __future__ import annotations

import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.platforms
from vllm.config import set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.selector import AttentionSelectorConfig

from backend_core.engines import vllm_flag
from backend_core.engines.vllm_flag import PlatformDelegate, Request, VllmBackendClaim
from dsv4_backend.engines.vllm import register as register_dsv4
from kda_backend.engines.vllm import register
from mla_backend.engines.vllm import register as register_mla
from tests.engines.kda.vllm.harness import engine_config

MLA = AttentionSelectorConfig(
    head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=True
)
FULL = MLA._replace(head_size=128, use_mla=False)


class Ours(TritonMLABackend):
    """What a family's claim returns; found by its module and name."""


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The registered families, of which a test may add some."""
    register()
    copy = dict(vllm_flag._families)
    monkeypatch.setattr(vllm_flag, "_families", copy)
    return copy


@pytest.fixture(params=["cuda", "rocm"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own selection of each platform, over candidates that need no GPU."""
    name: str = request.param
    if name == "cuda":
        stub = types.ModuleType("vllm._C_stable_libtorch")
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
        from vllm.platforms import cuda as module

        cls = module.NonNvmlCudaPlatform
    else:
        part = types.SimpleNamespace(gcnArchName="gfx942", name="MI300X")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *a: part)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: part.name)
        from vllm.platforms import rocm as module

        cls = module.RocmPlatform
    monkeypatch.setattr(
        cls, "get_device_capability", classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    )
    monkeypatch.setattr(
        module,
        "_get_backend_priorities",
        lambda use_mla, *a, **k: [
            AttentionBackendEnum.TRITON_MLA if use_mla else AttentionBackendEnum.TRITON_ATTN
        ],
    )
    built = cls()
    monkeypatch.setattr(vllm.platforms, "_current_platform", built)
    return built


def selected(platform: Any, selector: Any, config: Any) -> Any:
    """The class that serves a layer, as ``get_attn_backend`` finds it."""
    member = AttentionBackendEnum[vllm_flag.flag_name("kda")]
    with set_current_vllm_config(config):
        path = platform.get_attn_backend_cls(member, attn_selector_config=selector, num_heads=2)
    return resolve_obj_by_qualname(path)


def test_layers_of_two_kinds_get_a_choice_each(platform: Any, families: Any) -> None:
    """In any order, and again: a choice is no more than one layer's."""
    config = engine_config(flag=True)
    for selector in (MLA, FULL, MLA, FULL, FULL):
        want = TritonMLABackend if selector.use_mla else TritonAttentionBackend
        assert selected(platform, selector, config) is want
    assert vllm_flag._chosen is None


def test_one_kind_may_be_another_familys(
    platform: Any, families: Any, log_lines: list[str]
) -> None:
    """KDA's flag, MLA layers of another family, and full attention of nobody's."""
    asked: list[Request] = []

    def choose(request: Request) -> type | str:
        asked.append(request)
        return Ours

    families["mla"] = vllm_flag._Family((VllmBackendClaim("mla", "MLA", choose),))
    config = engine_config(flag=True)
    assert selected(platform, MLA, config) is Ours
    assert selected(platform, FULL, config) is TritonAttentionBackend
    (request,) = asked
    assert request.upstream is TritonMLABackend and request.selector == MLA
    assert request.vllm_config is config and request.num_heads == 2
    assert log_lines == [
        "kda-dsv4-backend: MLA layers are served by mla (Ours in the place of TritonMLABackend)"
    ]


def test_a_claim_that_declines_leaves_upstreams(
    platform: Any, families: Any, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is an error in no mode."""
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    claim = VllmBackendClaim("mla", "MLA", lambda request: "upstream's is ahead on this part")
    families["mla"] = vllm_flag._Family((claim,))
    config = engine_config(flag=True)
    for _ in range(2):
        assert selected(platform, MLA, config) is TritonMLABackend
    assert log_lines == [
        "kda-dsv4-backend: MLA layers stay on TritonMLABackend: upstream's is ahead on this part"
    ]


def test_the_delegate_serves_no_layer() -> None:
    assert PlatformDelegate.full_cls_name() == (vllm_flag.__name__, "PlatformDelegate")
    assert resolve_obj_by_qualname(vllm_flag._CHOICE) is PlatformDelegate
    with pytest.raises(AttributeError, match="has no attribute 'SoftmaxBackend'"):
        vllm_flag.SoftmaxBackend  # noqa: B018


REGISTER = """
import sys, torch
asked = []
torch.cuda.get_device_name = torch.cuda.get_device_capability = torch.cuda.current_device = (
    lambda *a, **k: asked.append("torch.cuda"))
import triton
class Driver:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        asked.append(f"triton driver: {name}")
        raise RuntimeError("a driver that was asked")
triton.runtime.driver.set_active(Driver())
import vllm.plugins
from vllm.engine.arg_utils import EngineArgs
before = set(sys.modules)
vllm.plugins.load_general_plugins()
new = set(sys.modules) - before
heavy = sorted(
    n for n in new
    if "flash_linear_attention" in n or n.startswith((
        "vllm.models", "vllm.model_executor.models", "vllm.model_executor.layers",
        "kda_backend.kernels", "dsv4_backend.kernels"))
)
from backend_core.engines import vllm_flag
print("REGISTERED", sorted(vllm_flag._families))
print("HEAVY", heavy)
print("CUDA", asked, torch.cuda.is_initialized())
"""


def test_registering_loads_no_layer_and_asks_no_device() -> None:
    """In every process of vLLM, for any model: else an engine cannot fork."""
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, "-c", REGISTER], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "REGISTERED ['dsv4', 'kda', 'mla']" in done.stdout
    assert "HEAVY []" in done.stdout and "CUDA [] False" in done.stdout, done.stdout


def test_a_spawned_process_unpickles_the_flag_before_plug_ins_are_loaded(
    families: dict[str, Any],
) -> None:
    """The engine's process is handed the configuration so; the families' names share one value."""
    register_dsv4()
    register_mla()
    names = {vllm_flag.flag_name(family) for family in vllm_flag._families} | {"TRITON_MLA"}
    assert len(names) == 4
    sent = pickle.dumps({name: AttentionBackendEnum[name] for name in sorted(names)})
    code = (
        "import pickle, sys; print({n: m.name for n, m in pickle.load(sys.stdin.buffer).items()})"
    )
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert done.stdout.decode().splitlines()[-1] == str({name: name for name in sorted(names)})
