"""sglang: its KDA layers on this backend, its full-attention layers on its own choice.

    sglang serve --model-path MODEL --attention-backend kda

Two hooks, both in modules that sglang's launcher imports anyway. The first takes ``kda`` out of the
arguments before sglang resolves them, so that every later decision about the full-attention layers
(backend, page size, chunked prefix cache) is the one of a server without the flag;
``--prefill-attention-backend`` and ``--decode-attention-backend`` still choose them by name. The
second hook gets the attention backend that sglang has built for a model and exchanges the two
kernels of its KDA layers (`sglang_layer`). ``--linear-attn-backend`` stays ``triton``: sglang ties
its prefix cache of recurrent states to that name.
"""

from __future__ import annotations

from typing import Any

from sglang.srt import server_args as server_args_module
from sglang.srt.layers.attention import attention_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from backend_core.engines import ENGINES
from backend_core.strict import fallback

FLAG = "kda"
_REQUESTED = "_kda_dsv4_requested"  # on ServerArgs, which sglang pickles to its schedulers
_OTHER_FLAGS = (
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)


def register() -> None:
    """Make the flag known to sglang; a second call changes nothing.

    Raises:
        FallbackError: in strict mode, with a version of sglang that is not supported.
        AttributeError: this sglang has no such seams.
    """
    engine = ENGINES["sglang"]
    version = engine.installed()
    if version is None or not engine.supports(version):
        fallback(
            f"sglang must be {engine.supported}, got {version}: --attention-backend kda is off"
        )
        return
    if FLAG in server_args_module.ATTENTION_BACKEND_CHOICES:
        return
    arguments = server_args_module.ServerArgs
    # 0.5.17 and 0.5.18 resolve the arguments as they are built, later releases on demand
    resolve = "resolve_once" if hasattr(arguments, "resolve_once") else "__post_init__"
    # sglang only logs a hook that finds no target
    for owner, name in ((arguments, resolve), (attention_registry, "attn_backend_wrapper")):
        getattr(owner, name)
    server_args_module.add_attention_backend_choices([FLAG])
    attention_registry.register_attention_backend(FLAG)(_unresolved)
    HookRegistry.register(
        f"{server_args_module.__name__}.ServerArgs.{resolve}", take_flag, HookType.BEFORE
    )
    HookRegistry.register(
        f"{attention_registry.__name__}.attn_backend_wrapper", exchange_kernels, HookType.AFTER
    )


def take_flag(server_args: Any) -> None:
    """Before sglang resolves its arguments: note the flag, and leave the choice to sglang.

    Raises:
        ValueError: another flag asks for ``kda``.
    """
    for name in _OTHER_FLAGS:
        if getattr(server_args, name, None) == FLAG:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must name a full-attention backend, got {FLAG}")
    if server_args.attention_backend == FLAG:
        server_args.attention_backend = None
        setattr(server_args, _REQUESTED, True)


def exchange_kernels(backend: Any, runner: Any, full_attn_backend: Any) -> None:
    """After sglang has built ``backend`` for a model: put our kernels into its KDA layers.

    ``runner`` is sglang's ModelRunner, with its weights loaded and its pools allocated. A draft
    model of speculative decoding need not have KDA layers.
    """
    if not getattr(runner.server_args, _REQUESTED, False):
        return
    from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend

    from kda_backend.engines import sglang_layer

    linear = getattr(backend, "linear_attn_backend", None)
    if isinstance(linear, KDAAttnBackend):
        sglang_layer.install(linear, runner)
    elif not runner.is_draft_worker:
        models = runner.model_config.hf_config.architectures
        fallback(f"{' '.join(models or ['this model'])} has no KDA layers")


def _unresolved(runner: Any) -> Any:
    """What the name ``kda`` builds where it is not taken out of the arguments: an error."""
    raise RuntimeError(
        f"--attention-backend {FLAG} reached sglang's model runner: its arguments were not resolved"
        " through kda-dsv4-backend"
    )
