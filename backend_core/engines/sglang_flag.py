"""sglang: one flag for all families, dispatched by the kinds of a model's layers.

A name says that our operators are wanted, and nothing about the attention itself. So it is taken
out of the arguments before sglang resolves them, and every later decision (attention backend, page
size, chunked prefix cache) is the one of a server without the flag. Once sglang builds its
attention backend for a model, the *claims* of every family are asked, so that one model's
linear-attention layers and MLA layers may be served by two families; the name must be that of a
family which serves layers of the model. A kind of layer that nobody claims, or whose claim
declines, is upstream's. There are two sorts of claim:

- `SglangLayerClaim`, of kind ``"linear_attention"``, ``"compressor"`` or DeepSeek-V4's
  ``"sparse_mla"``: the family changes parts of the attention backend that sglang has built;
- `SglangBackendClaim`, of kind ``"mla"``, ``"sparse_mla"`` or ``"attention"``: the family is asked
  for a class that stands in the place of sglang's full-attention backend.

Two hooks do it, both in modules that sglang's launcher imports anyway, and a third where a claim
takes memory, once the launcher's schedulers import their ModelRunner. ``dsv4`` is also the name of
sglang's own attention backend, which it chooses for DeepSeek-V4 by itself: only where a user passes
it does it mean this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from sglang.srt import server_args as server_args_module
from sglang.srt.configs.model_config import is_deepseek_dsa, is_deepseek_v4
from sglang.srt.layers.attention import attention_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils.common import rank0_log

from backend_core import engines
from backend_core.engines import seams
from backend_core.engines.after_import import after_import
from backend_core.engines.in_place import in_place_of
from backend_core.engines.log import PREFIX
from backend_core.engines.seams import Part
from backend_core.family import ModelConfig
from backend_core.strict import fallback


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Layers of one kind that a family serves.

    Attributes:
        kind: of a `SglangLayerClaim` ``"linear_attention"``, ``"compressor"`` or ``"sparse_mla"``;
            of a `SglangBackendClaim` ``"mla"``, ``"sparse_mla"`` or ``"attention"``, see `kind_of`.
        title: what they are called in a sentence: ``"Kimi Delta Attention"``.
        part: what is relied on to serve them.
        of_model: whether a model has them, from its configuration.
        deterministic: they are served under ``--enable-deterministic-inference`` too.
    """

    kind: str
    title: str
    part: Part
    of_model: Callable[[ModelConfig], bool]
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class SglangLayerClaim(Claim):
    """Layers that parts of sglang's attention backend serve.

    Attributes:
        present: whether sglang's attention backend, of the model that its ModelRunner holds, has
            such layers.
        install: called with both where it has: weights are loaded, pools allocated.
        reserve: called with a ModelRunner before its pools are sized, weights loaded: memory that
            is taken here is in sglang's account. For any model; `present` is asked later.
    """

    present: Callable[[Any, Any], bool]
    install: Callable[[Any, Any], None]
    reserve: Callable[[Any], None] | None = None


@dataclass(frozen=True, kw_only=True)
class SglangBackendClaim(Claim):
    """Full-attention layers.

    Attributes:
        choose: called with sglang's ModelRunner and the full-attention backend that it has built,
            pools allocated. Returns a class, which is built with the same two arguments, stands in
            that backend's place and may hand it what it does not serve; or the reason why
            upstream's stays, which is logged. Claims of one kind are asked in the order of their
            registration. Report an error through `backend_core.strict.fallback`; a refusal is text.
    """

    choose: Callable[[Any, Any], type | str]


_MODEL_RUNNER = "sglang.srt.model_executor.model_runner"
_REQUESTED = "_kda_dsv4_requested"  # on ServerArgs, which sglang pickles to its schedulers
_OTHER_FLAGS = (
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)
_families: dict[str, tuple[Claim, ...]] = {}
_own_names: set[str] = set()


def register_family(family: str, claims: Sequence[Claim]) -> bool:
    """Make a family's name known to sglang, and its claims; a second call changes nothing.

    Returns:
        Whether this call has done so.
    """
    if family in _families:
        return False
    if not _families:
        _register_hooks()
    name = flag_name(family)
    if name not in server_args_module.ATTENTION_BACKEND_CHOICES:
        server_args_module.add_attention_backend_choices([name])
        attention_registry.register_attention_backend(name)(_unresolved(name))
        _own_names.add(name)
    _families[family] = tuple(claims)
    return True


def flag_name(family: str) -> str:
    """The value of ``--attention-backend`` for a family."""
    return engines.flag_name("sglang", family)


def say(*lines: str) -> None:
    """Log what was chosen, on rank 0."""
    for line in lines:
        rank0_log(f"{PREFIX}: {line}")


def _register_hooks() -> None:
    arguments = server_args_module.ServerArgs
    HookRegistry.register(
        f"{server_args_module.__name__}.{arguments.__name__}.resolve_once",
        take_flag,
        HookType.BEFORE,
    )
    HookRegistry.register(
        f"{attention_registry.__name__}.attn_backend_wrapper", build_backend, HookType.AROUND
    )
    after_import(_MODEL_RUNNER, _wrap_model_runner)


def _wrap_model_runner(module: ModuleType) -> None:
    """Before its weights are loaded hold what is relied on, before its pools are sized reserve."""
    for name, act in (("load_model", _hold), ("alloc_memory_pool", _reserve)):
        _act_before(module.ModelRunner, name, act)


def _act_before(runner: Any, name: str, act: Callable[[Any], None]) -> None:
    upstream = getattr(runner, name)

    @in_place_of(runner, name)
    def act_and_go_on(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_requested(self.server_args):
            act(self)
        return upstream(self, *args, **kwargs)


def _hold(runner: Any) -> None:
    config = runner.model_config.hf_config.to_dict()
    config |= runner.model_config.hf_text_config.to_dict()
    for claims in _families.values():
        for claim in claims:
            if declined(claim, runner.server_args) is not None or not claim.of_model(config):
                continue
            if (reason := seams.refusal(claim.part)) is not None:
                fallback(reason)


def _reserve(runner: Any) -> None:
    for claims in _families.values():
        for claim in claims:
            reserve = getattr(claim, "reserve", None)
            if reserve is None or declined(claim, runner.server_args) is not None:
                continue
            if seams.refusal(claim.part) is None:
                reserve(runner)


def declined(claim: Claim, server_args: Any) -> str | None:
    """Why the layers of a claim are not served under these arguments."""
    if is_deterministic(server_args) and not claim.deterministic:
        return (
            "--enable-deterministic-inference is on, and the kernel paths of this backend change"
            " with the batch"
        )
    return None


def is_deterministic(server_args: Any) -> bool:
    """Whether the user asks for ``--enable-deterministic-inference``, by itself or by the option
    that turns it on."""
    asked = server_args.enable_deterministic_inference
    return bool(asked) or getattr(server_args, "rl_on_policy_target", None) is not None


def is_requested(server_args: Any) -> bool:
    """Whether the flag was given."""
    return getattr(server_args, _REQUESTED, None) is not None


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


def build_backend(build: Callable[[Any, Any], Any], runner: Any, full_attn_backend: Any) -> Any:
    """In the place of ``attn_backend_wrapper``: sglang's attention backend with what is claimed."""
    family = getattr(runner.server_args, _REQUESTED, None)
    if family is None:
        return build(runner, full_attn_backend)
    reasons = [declined(claim, runner.server_args) for claim in _families[family]]
    if reasons and all(reasons):
        fallback(f"--attention-backend {family}: {reasons[0]}")
    chosen = _full_attention(runner, full_attn_backend)
    backend = build(runner, full_attn_backend if chosen is None else chosen)
    present = {
        name: [
            claim
            for claim in claims
            if isinstance(claim, SglangLayerClaim) and claim.present(backend, runner)
        ]
        for name, claims in _families.items()
    }
    kind = kind_of(runner)
    if not present[family] and kind not in {claim.kind for claim in _families[family]}:
        if not runner.is_draft_worker:  # a draft of speculative decoding need not have them
            titles = " or ".join(claim.title for claim in _families[family])
            fallback(f"{models_of(runner)} has no {titles} layers")
        return backend
    for claims in present.values():
        for claim in claims:
            reason = declined(claim, runner.server_args)
            if reason is not None:
                reason = f"--attention-backend {family}: {reason}"
            elif (reason := seams.refusal(claim.part)) is None:
                claim.install(backend, runner)
                continue
            fallback(reason)
    if getattr(runner.server_args, "enable_torch_compile", False):
        # kernels here are launched with addresses, which dynamo cannot trace
        backend.forward = torch.compiler.disable(backend.forward)  # type: ignore[no-untyped-call]
    return backend


def _full_attention(runner: Any, upstream: Any) -> Any | None:
    """The family's replacement of sglang's full-attention backend, if any."""
    for family, claims in _families.items():
        for claim in claims:
            if not isinstance(claim, SglangBackendClaim) or claim.kind != kind_of(runner):
                continue
            reason = declined(claim, runner.server_args) or seams.refusal(claim.part)
            answer = reason or claim.choose(runner, upstream)
            name = type(upstream).__name__
            if isinstance(answer, type):
                say(
                    f"{claim.title} layers are served by {family}"
                    f" ({answer.__name__} in the place of {name})"
                )
                return answer(runner, upstream)
            say(f"{claim.title} layers stay on {name}: {answer}")
    return None


def kind_of(runner: Any) -> str:
    """The kind of the full-attention layers of a ModelRunner's model."""
    config = runner.model_config.hf_config
    if is_deepseek_dsa(config) or is_deepseek_v4(config):
        return "sparse_mla"
    return "mla" if runner.use_mla_backend else "attention"


def models_of(runner: Any) -> str:
    """The model's classes, as its configuration names them."""
    return " ".join(runner.model_config.hf_config.architectures or ["this model"])


def _unresolved(name: str) -> Callable[[Any], Any]:
    """Raise an error: the name must be taken out of the arguments before this."""

    def build(runner: Any) -> Any:
        raise RuntimeError(
            f"--attention-backend {name} reached sglang's model runner: its arguments were not"
            " resolved through kda-dsv4-backend"
        )

    return build
