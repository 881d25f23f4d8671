"""vLLM: the name that ``--attention-backend`` takes for a model family, and what it stands for.

From 0.32 on each family has a name of its own, ``KDA`` or ``DSV4``. Before, vLLM leaves plug-ins
one name, ``CUSTOM``, which the families share: which one serves, the model says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from backend_core.engines import ENGINES

# A name below "vllm." has the engine's handlers and format.
logger = init_logger("vllm.kda_dsv4")

_BACKEND = f"{__name__}.SoftmaxBackend"

Refusal = Callable[[Any], str | None]
"""From a ``VllmConfig`` to why its model is not of a family, or ``None``."""

_families: dict[str, Refusal] = {}
_said: set[str] = set()


def flag_name(family: str) -> str:
    """What ``--attention-backend`` is to be given for ``"KDA"`` or ``"DSV4"``.

    Releases that take new names are told by their signature, since source builds carry any version.
    """
    return family if hasattr(AttentionBackendEnum, "register") else "CUSTOM"


def is_requested(vllm_config: Any, family: str) -> bool:
    """Whether the user passed the flag, for all layers or for one kind of them."""
    config = vllm_config.attention_config
    chosen = (config.backend, *config.backend_per_kind.values())
    return any(backend is not None and backend.name == flag_name(family) for backend in chosen)


def register_flag(family: str, refusal: Refusal) -> bool:
    """Name `SoftmaxBackend` for a family; a second call changes nothing.

    Args:
        refusal: is asked where a platform resolves the name; may raise in strict mode.

    Returns:
        False, after one line, where the release is not supported or another plug-in holds the only
        name there is.
    """
    engine = ENGINES["vllm"]
    version = engine.installed()
    if version is None or not engine.supports(version):
        _say(
            f"kda-dsv4-backend serves vllm {engine.supported}, got {version}: nothing is registered"
        )
        return False
    name = flag_name(family)
    if name == family:
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, _BACKEND)
    else:
        custom = AttentionBackendEnum.CUSTOM
        if custom.is_overridden() and custom.get_path() != _BACKEND:
            _say(
                "another plug-in holds --attention-backend CUSTOM"
                f" ({custom.get_path()}), the only name that vllm {version}"
                " leaves to plug-ins: kda-dsv4-backend is not registered"
            )
            return False
        register_backend(custom, _BACKEND)
    _families[family] = refusal
    return True


def _say(line: str) -> None:
    """Once a process: each family finds the same."""
    if line not in _said:
        _said.add(line)
        logger.warning("%s", line)


class SoftmaxBackend(AttentionBackend):  # type: ignore[misc]
    """Stands for the backend that the platform chooses for softmax and MLA layers by itself.

    A platform validates the class that the flag names, then asks it for its path: that is where
    the choice is made and handed over. No layer ever runs this class.
    """

    _choice: type[AttentionBackend] | None = None

    @classmethod
    def validate_configuration(cls, device_capability: Any, **config: Any) -> list[str]:
        """The reasons against serving this layer; none means that `full_cls_name` has an answer.

        Args:
            config: the fields of the release's ``AttentionSelectorConfig``.
        """
        from vllm.config import get_current_vllm_config
        from vllm.platforms import current_platform
        from vllm.utils.import_utils import resolve_obj_by_qualname
        from vllm.v1.attention.selector import AttentionSelectorConfig

        vllm_config = get_current_vllm_config()
        asked = [family for family in _families if is_requested(vllm_config, family)]
        reasons = []
        for family in asked:
            reason = _families[family](vllm_config)
            if reason is None:
                break
            reasons.append(reason)
        else:
            if reasons:
                return reasons
        model = vllm_config.model_config
        path = current_platform.get_attn_backend_cls(
            None,
            attn_selector_config=AttentionSelectorConfig(**config),
            num_heads=model.get_num_attention_heads(vllm_config.parallel_config),
        )
        cls._choice = resolve_obj_by_qualname(path)
        if current_platform.is_rocm():
            # ROCm reads the registered path instead of asking the class for its own.
            for family in asked:
                register_backend(AttentionBackendEnum[flag_name(family)], path)
        return []

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Module and name of the platform's choice."""
        assert cls._choice is not None  # a platform validates first
        name: tuple[str, str] = cls._choice.full_cls_name()
        return name

    @staticmethod
    def get_name() -> str:
        return "KDA_DSV4"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the platform's own choice implements the layers")

    @staticmethod
    def get_builder_cls() -> Any:
        raise NotImplementedError("the platform's own choice builds its metadata")

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        raise NotImplementedError("the platform's own choice lays its cache out")
