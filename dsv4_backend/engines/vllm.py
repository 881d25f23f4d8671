"""vLLM: DeepSeek-V4's compressors on this backend, its attention as without a flag.

    vllm serve MODEL --attention-backend DSV4      # 0.32 and newer
    vllm serve MODEL --attention-backend CUSTOM    # 0.26 to 0.31, which take no new names

vLLM builds a compressor as ``DeepseekCompressor``, a plain module. Once that class is imported,
which only a DeepSeek-V4 model does, its ``__init__`` ends with the decision: with the flag, and
where this backend serves it, the compressor becomes a `vllm_compressor.FusedCompressor`; otherwise
it stays what it is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from backend_core.engines import vllm_flag
from backend_core.engines.vllm_flag import logger
from backend_core.strict import fallback

_FAMILY = "DSV4"
# DeepSeek-V4.1's is another class: it stays stock's, which is said
_COMPRESSORS = ("vllm.models.deepseek_v4.compressor", "vllm.models.deepseek_v41.compressor")
_ATTENTION = "vllm.models.deepseek_v4.attention"
ROTATE = "rotate_indexer"  # in --additional-config

_broken: str | None = None


def register() -> None:
    """Make the flag known and wait for vLLM's compressor; a second call changes nothing.

    Never raises: an exception here would end every vLLM process, with or without the flag. What
    goes wrong is logged, and reported when the flag asks for this backend.
    """
    try:
        if not vllm_flag.register_flag(_FAMILY, _refusal):
            return
        for name in (*_COMPRESSORS, _ATTENTION):
            if name in sys.modules:
                _install(sys.modules[name])
            elif _AfterImport(name) not in sys.meta_path:
                sys.meta_path.insert(0, _AfterImport(name))
    except Exception as error:
        _report(error)


def flag_name() -> str:
    """What ``--attention-backend`` is to be given: its own name where the release takes one."""
    return vllm_flag.flag_name(_FAMILY)


def is_requested(vllm_config: Any) -> bool:
    """Whether the user passed the flag, for all layers or for one kind of them."""
    return vllm_flag.is_requested(vllm_config, _FAMILY)


def _refusal(vllm_config: Any) -> str | None:
    """Why the model's softmax layers are not handed to the platform: it is no DeepSeek-V4.

    DeepSeek-V4's own layers do not ask: vLLM gives them their backend as without a flag.
    """
    model = vllm_config.model_config
    kind = model.hf_text_config.model_type
    if kind == "deepseek_v4":
        return None
    return (
        f"--attention-backend {flag_name()} is for DeepSeek-V4, whose configuration has model_type"
        f" deepseek_v4, got {kind}"
    )


def _report(error: Exception) -> None:
    global _broken
    _broken = (
        "kda-dsv4-backend could not take over vllm's DeepSeek-V4 compressor:"
        f" {type(error).__name__}: {error}"
    )
    logger.warning("%s", _broken)


@dataclass(frozen=True)
class _AfterImport(MetaPathFinder):
    """Runs `_install` on a module of vLLM's when something imports it.

    Importing it to patch it would load the whole model in every vLLM process.
    """

    name: str

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)  # the other finders know where it lies
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                _install(module)
            except Exception as error:
                _report(error)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install(module: ModuleType) -> None:
    """Let the class of compressors, or of indexers, end its ``__init__`` with a decision."""
    is_compressor = module.__name__ in _COMPRESSORS
    stock = module.DeepseekCompressor if is_compressor else module.DeepseekV4Indexer
    decide = _adopt if is_compressor else _rotate
    build = stock.__init__
    if hasattr(build, "_kda_dsv4"):
        return

    @functools.wraps(build)
    def build_and_decide(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        build(self, vllm_config, *args, **kwargs)
        if is_requested(vllm_config):
            decide(self, vllm_config)

    build_and_decide._kda_dsv4 = True  # type: ignore[attr-defined]
    stock.__init__ = build_and_decide


def _adopt(compressor: Any, vllm_config: Any) -> None:
    if _broken is None:
        try:
            ours = importlib.import_module("dsv4_backend.engines.vllm_compressor")
            reason = ours.adopt(compressor, vllm_config)
        except Exception as error:
            _report(error)
    if _broken is not None:
        reason = _broken
    if reason is not None:
        fallback(f"--attention-backend {flag_name()}: {reason}")


def _rotate(indexer: Any, vllm_config: Any) -> None:
    """Rotate an indexer's keys and queries where the user asks for it.

    Raises:
        ValueError: the setting is no boolean.
        RuntimeError: this indexer cannot be rotated and another one already was.
    """
    config = vllm_config.additional_config
    wanted = config.get(ROTATE, False) if isinstance(config, dict) else False
    if not isinstance(wanted, bool):
        raise ValueError(f"--additional-config {ROTATE} must be true or false, got {wanted!r}")
    if not wanted:
        return
    reason = _broken
    if reason is None:
        ours = importlib.import_module("dsv4_backend.engines.vllm_rotation")
        reason = ours.rotate(indexer, vllm_config)
    if reason is not None:
        fallback(f"--additional-config {ROTATE}: {reason}; nothing is rotated")
