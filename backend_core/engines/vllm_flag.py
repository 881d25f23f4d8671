"""vLLM: one flag for all families, dispatched by the kinds of a model's layers.

    vllm serve MODEL --attention-backend KDA       # a family's name

The name must be that of a family which serves layers of the model. Passing it turns on the *claims*
of every family, so that one model's linear-attention layers and MLA layers may be served by two
families. A kind of layer that nobody claims, or whose claim declines, is upstream's. There are two
sorts of claim:

- `VllmLayerClaim`: layers that the model builds as a class, ``"linear_attention"``,
  ``"compressor"`` and DeepSeek-V4's ``"sparse_mla"``. The family puts a class in upstream's place
  after the module that defines it has been imported, and decides as a layer is built.
- `VllmBackendClaim`: layers for which vLLM asks its platform for an attention backend, ``"mla"``,
  ``"sparse_mla"`` and ``"attention"``. The family is asked for a backend class.
"""

from __future__ import annotations

import copyreg
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from backend_core import engines
from backend_core.engines import seams
from backend_core.engines.after_import import after_import
from backend_core.engines.log import PREFIX
from backend_core.engines.seam_list import VLLM_BACKENDS
from backend_core.strict import fallback

# A name below "vllm." has the engine's handlers and format.
logger = init_logger("vllm.kda_dsv4")

_CHOICE = f"{__name__}.PlatformChoice"


@dataclass(frozen=True)
class VllmLayerClaim:
    """Layers that a model builds as a class of its own.

    Attributes:
        kind: ``"linear_attention"``, ``"compressor"`` or ``"sparse_mla"``.
        title: what they are called in a sentence: ``"Kimi Delta Attention"``.
        modules: vLLM's modules that define the classes. A module that has been imported says that
            the model has such layers: nothing but the models that build them imports it.
        install: called once with each of these modules after its import, flag or not: puts the
            family's class in place, or lets upstream's class decide as it is built (`after_init`),
            by `requested`. What it raises is kept, and reported where the flag is passed.
    """

    kind: str
    title: str
    modules: tuple[str, ...]
    install: Callable[[ModuleType], None]


@dataclass(frozen=True)
class Request:
    """A layer, or several alike, that asks for an attention backend.

    Attributes:
        vllm_config: the model's ``VllmConfig``.
        selector: the release's ``AttentionSelectorConfig``: head size, dtypes, block size, and
            the layer's sinks, sparsity and windows.
        num_heads: query heads of a rank.
        upstream: the class that the platform chooses without a flag; it serves where a claim
            declines. A class that serves must lay out its cache as vLLM's page-size arithmetic for
            this layer expects, which a subclass of ``upstream`` does by itself.
    """

    vllm_config: Any
    selector: Any
    num_heads: int
    upstream: type[AttentionBackend]


@dataclass(frozen=True)
class VllmBackendClaim:
    """Layers for which vLLM asks for an attention backend.

    Attributes:
        kind: ``"mla"``, ``"sparse_mla"`` or ``"attention"``, see `kind_of`.
        title: what they are called in a sentence: ``"MLA"``.
        choose: the backend class that serves a `Request`, importable by its module and name; or
            the reason why upstream's stays, which is logged once. Called as a layer is built, so
            it may import vLLM's layers; claims of one kind are asked in the order of their
            registration. Report an error through `backend_core.strict.fallback`; a refusal is text.
    """

    kind: str
    title: str
    choose: Callable[[Request], type[AttentionBackend] | str]


@dataclass
class _Family:
    claims: tuple[VllmLayerClaim | VllmBackendClaim, ...]
    broken: str | None = None

    def serves(self, kind: str) -> bool:
        """Whether a model with layers of this kind is one that the family's flag is for."""
        return any(
            claim.kind == kind
            if isinstance(claim, VllmBackendClaim)
            else any(name in sys.modules for name in claim.modules)
            for claim in self.claims
        )

    @property
    def title(self) -> str:
        return " or ".join(dict.fromkeys(claim.title for claim in self.claims))


_families: dict[str, _Family] = {}
_logged: set[str] = set()


def register_family(family: str, claims: Sequence[VllmLayerClaim | VllmBackendClaim]) -> None:
    """Make a family's name known to vLLM, and its claims; a second call changes nothing.

    Imports nothing of vLLM but its registry of backends.
    """
    if family in _families and not _families[family].broken:
        return
    named_backend(flag_name(family))
    copyreg.pickle(AttentionBackendEnum, _reduced)
    _families[family] = _Family(tuple(claims))
    for claim in claims:
        if isinstance(claim, VllmLayerClaim):
            for module in claim.modules:
                after_import(module, functools.partial(_install, family, claim))


def named_backend(name: str) -> Any:
    """The registry's member of a family's name, added where it is not there."""
    if name not in AttentionBackendEnum.__members__:
        register_backend(name, _CHOICE)
    return AttentionBackendEnum[name]


def _reduced(member: Any) -> tuple[Callable[..., Any], tuple[str]]:
    """How a member of the registry is pickled.

    vLLM hands its configuration to the engine's process, and a process that is spawned unpickles it
    before it has loaded any plug-in: ours must bring their registration. The enumeration's own
    way, by the value, would also mix up the names, since they share one.
    """
    ours = {flag_name(family) for family in _families}
    if member.name in ours:
        return named_backend, (member.name,)
    return AttentionBackendEnum, (member.value,)


def flag_name(family: str) -> str:
    """The value of ``--attention-backend`` for a family."""
    return engines.flag_name("vllm", family)


def requested(vllm_config: Any) -> str | None:
    """The name of ours that the user passed, for all layers or for one kind of them."""
    ours = {flag_name(family) for family in _families}
    config = vllm_config.attention_config
    for backend in (config.backend, *config.backend_per_kind.values()):
        if backend is not None and backend.name in ours:
            return str(backend.name)
    return None


def after_init(cls: Any, decide: Callable[[Any, Any], None]) -> None:
    """Let a class of upstream's end its ``__init__`` with a decision, where the flag is passed.

    Several may be made, one after another; a second call with the same one changes nothing.

    Args:
        decide: called with the object and the ``VllmConfig`` that it was built under.
    """
    build = cls.__init__
    decisions: list[Callable[[Any, Any], None]] = getattr(build, "_kda_dsv4", [])
    if decide not in decisions:
        decisions.append(decide)
    if hasattr(build, "_kda_dsv4"):
        return

    @functools.wraps(build)
    def build_and_decide(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        build(self, *args, **kwargs)
        vllm_config = get_current_vllm_config()
        if requested(vllm_config) is not None:
            for one in decisions:
                one(self, vllm_config)

    build_and_decide._kda_dsv4 = decisions  # type: ignore[attr-defined]
    cls.__init__ = build_and_decide


def report_broken(family: str, error: Exception) -> str:
    """Log once why a family cannot serve, and keep it for where the flag is passed."""
    reason = (
        f"kda-dsv4-backend could not register {family} with vllm: {type(error).__name__}: {error}"
    )
    _families.setdefault(family, _Family(())).broken = reason
    _log_once(reason)
    return reason


def broken(family: str) -> str | None:
    """Why a family cannot serve, if something of it failed."""
    return _families[family].broken if family in _families else None


def batch_invariant() -> bool:
    """Whether the user asks that a request's result depend on nothing else in its batch."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def offloads_weights(vllm_config: Any) -> bool:
    """Whether weights are kept in host memory, so that a layer's are there in its forward alone."""
    offload = vllm_config.offload_config
    return bool(offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size)


def log_failed_step(what: str, error: Exception) -> None:
    """Say once what failed in a step, before its exception leaves this backend.

    There is no way back to upstream's code: other sequences of the step may have been written. So
    vLLM ends the engine and fails every request in it, and none gets a wrong answer.
    """
    _log_once(
        f"{PREFIX}: the step of {what} failed, and vllm will end this engine and its"
        f" requests: {type(error).__name__}: {error}",
        logger.error,
    )


def kind_of(selector: Any) -> str:
    """The kind of a layer that asks for an attention backend, from its selector configuration."""
    if not selector.use_mla:
        return "attention"
    return "sparse_mla" if selector.use_sparse else "mla"


def _install(family: str, claim: VllmLayerClaim, module: ModuleType) -> None:
    try:
        claim.install(module)
    except Exception as error:  # would end the import, for servers without the flag too
        report_broken(family, error)


def say(*lines: str) -> None:
    """Log what was chosen, each line once."""
    for line in lines:
        _log_once(f"{PREFIX}: {line}", logger.info)


def _log_once(line: str, level: Callable[..., None] | None = None) -> None:
    if line not in _logged:
        _logged.add(line)
        (level or logger.warning)("%s", line)


def choose(vllm_config: Any, selector: Any) -> type[AttentionBackend] | list[str]:
    """The attention backend of a layer under a flag of ours; or why the flag is refused.

    Raises:
        FallbackError: in strict mode, where a family that is asked for has failed.
        ValueError: the platform has no backend for this layer.
    """
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    if (reason := seams.refusal(VLLM_BACKENDS)) is not None:
        return [reason]
    kind, model = kind_of(selector), vllm_config.model_config
    name = requested(vllm_config)
    named = [f for f in _families if flag_name(f) == name]
    reasons = [
        f"--attention-backend {name} is for models with {_families[f].title} layers, of which"
        f" {model.architecture} has none"
        for f in named
        if not _families[f].serves(kind) and _families[f].broken is None
    ]
    if reasons and len(reasons) == len(named):
        return reasons
    for family in named:
        if (reason := _families[family].broken) is not None:
            fallback(reason)
    num_heads = model.get_num_attention_heads(vllm_config.parallel_config)
    path = current_platform.get_attn_backend_cls(
        None, attn_selector_config=selector, num_heads=num_heads
    )
    upstream: type[AttentionBackend] = resolve_obj_by_qualname(path)
    for family, registered in _families.items():
        for claim in registered.claims:
            if not isinstance(claim, VllmBackendClaim) or claim.kind != kind:
                continue
            answer = claim.choose(Request(vllm_config, selector, num_heads, upstream))
            if isinstance(answer, type):
                say(
                    f"{claim.title} layers are served by {family}"
                    f" ({answer.__name__} in the place of {upstream.__name__})"
                )
                return answer
            say(f"{claim.title} layers stay on {upstream.__name__}: {answer}")
    return upstream


_chosen: type[AttentionBackend] | None = None


class PlatformDelegate(AttentionBackend):  # type: ignore[misc]
    """The class behind the flag's name until a layer asks; no layer runs it.

    A platform validates the class that the flag names, which is where the choice for the layer is
    made. Then CUDA asks the class for its path, and ROCm takes the registered one. Both lead to
    the choice: the first by `full_cls_name`, the second because the registered path,
    ``PlatformChoice`` of this module, is this class before a choice and the choice after it, once.
    So the layers of a model may differ in what serves them.
    """

    @classmethod
    def validate_configuration(cls, device_capability: Any, **config: Any) -> list[str]:
        """The reasons against serving this layer; none means that there is a choice.

        Args:
            config: the fields of the release's ``AttentionSelectorConfig``.
        """
        global _chosen
        from vllm.config import get_current_vllm_config
        from vllm.v1.attention.selector import AttentionSelectorConfig

        answer = choose(get_current_vllm_config(), AttentionSelectorConfig(**config))
        if isinstance(answer, list):
            return answer
        _chosen = answer
        return []

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Module and name of the choice."""
        chosen = _take_choice()
        owner: Any = super() if chosen is cls else chosen
        name: tuple[str, str] = owner.full_cls_name()
        return name

    @staticmethod
    def get_name() -> str:
        return "KDA_DSV4"


def _take_choice() -> type[AttentionBackend]:
    global _chosen
    chosen, _chosen = _chosen, None
    return PlatformDelegate if chosen is None else chosen


def __getattr__(name: str) -> Any:
    if name == "PlatformChoice":
        return _take_choice()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
