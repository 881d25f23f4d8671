"""sglang: the names that ``--attention-backend`` takes for model families, and what they stand for.

A name says that a family's operators are wanted, and nothing about the attention itself. So it is
taken out of the arguments before sglang resolves them, and every later decision (attention backend,
page size, chunked prefix cache) is the one of a server without the flag. Once sglang has built its
attention backend for a model, the family that was asked for changes that object.

Two hooks do it, both in modules that sglang's launcher imports anyway. ``dsv4`` is also the name of
sglang's own attention backend, which it chooses for DeepSeek-V4 by itself: only where a user passes
it does it mean this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt import server_args as server_args_module
from sglang.srt.layers.attention import attention_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from backend_core.engines import ENGINES
from backend_core.strict import fallback

Install = Callable[[Any, Any], None]
"""Called with sglang's attention backend and its ModelRunner: weights loaded, pools allocated."""

_REQUESTED = "_kda_dsv4_requested"  # on ServerArgs, which sglang pickles to its schedulers
_OTHER_FLAGS = (
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)
_families: dict[str, Install] = {}
_own_names: set[str] = set()


def register_flag(family: str, install: Install) -> None:
    """Make a family's name known to sglang; a second call changes nothing.

    Raises:
        FallbackError: in strict mode, with a version of sglang that is not supported.
        AttributeError: this sglang has no such seams.
    """
    engine = ENGINES["sglang"]
    version = engine.installed()
    if version is None or not engine.supports(version):
        fallback(
            f"sglang must be {engine.supported}, got {version}:"
            " --attention-backend means sglang's own backends alone"
        )
        return
    if family in _families:
        return
    if not _families:
        _register_hooks()
    if family not in server_args_module.ATTENTION_BACKEND_CHOICES:
        server_args_module.add_attention_backend_choices([family])
        attention_registry.register_attention_backend(family)(_unresolved(family))
        _own_names.add(family)
    _families[family] = install


def _register_hooks() -> None:
    arguments = server_args_module.ServerArgs
    # 0.5.17 and 0.5.18 resolve the arguments as they are built, later releases on demand
    resolve = "resolve_once" if hasattr(arguments, "resolve_once") else "__post_init__"
    # sglang only logs a hook that finds no target
    for owner, name in ((arguments, resolve), (attention_registry, "attn_backend_wrapper")):
        getattr(owner, name)
    HookRegistry.register(
        f"{server_args_module.__name__}.ServerArgs.{resolve}", take_flag, HookType.BEFORE
    )
    HookRegistry.register(
        f"{attention_registry.__name__}.attn_backend_wrapper", install_family, HookType.AFTER
    )


def take_flag(server_args: Any) -> None:
    """Before sglang resolves its arguments: note the flag, and leave the choice to sglang.

    Raises:
        ValueError: a flag for one phase asks for a name that is not one of sglang's own.
    """
    for name in _OTHER_FLAGS:
        value = getattr(server_args, name, None)
        if value in _own_names:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must name a full-attention backend, got {value}")
    if server_args.attention_backend in _families:
        setattr(server_args, _REQUESTED, server_args.attention_backend)
        server_args.attention_backend = None


def install_family(backend: Any, runner: Any, full_attn_backend: Any) -> None:
    """After sglang has built ``backend`` for a model: hand it to the family that was asked for."""
    family = getattr(runner.server_args, _REQUESTED, None)
    if family is not None:
        _families[family](backend, runner)


def models_of(runner: Any) -> str:
    """The model's classes, as its configuration names them."""
    return " ".join(runner.model_config.hf_config.architectures or ["this model"])


def _unresolved(family: str) -> Callable[[Any], Any]:
    """What a name builds where it is not taken out of the arguments: an error."""

    def build(runner: Any) -> Any:
        raise RuntimeError(
            f"--attention-backend {family} reached sglang's model runner: its arguments were not"
            " resolved through kda-dsv4-backend"
        )

    return build
