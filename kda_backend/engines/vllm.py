"""vLLM: its KDA layers on this backend, its softmax layers on the platform's own choice.

    vllm serve MODEL --attention-backend KDA       # 0.32 and newer
    vllm serve MODEL --attention-backend CUSTOM    # 0.26 to 0.31, which take no new names

The flag names `SoftmaxBackend`, which hands the MLA layers to what the platform would have chosen
without a flag. vLLM builds a KDA layer as the class that is registered in place of
``KimiGatedDeltaNetAttention``: `vllm_layer` and one small file for each form of vLLM's own layer.
Without the flag that class turns into the stock one as it is built.
"""

from __future__ import annotations

import importlib
from typing import Any

from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from backend_core.engines import ENGINES, Engine
from backend_core.strict import fallback

# A name below "vllm." has the engine's handlers and format.
logger = init_logger("vllm.kda_dsv4")

_LAYER = "KimiGatedDeltaNetAttention"
_BACKEND = f"{__name__}.SoftmaxBackend"
# The first release of each form of vLLM's layer, newest first.
# vllm_v026 goes when 0.26 is no longer supported; vllm_v027 when its layer changes form.
_FORMS = (("0.27.0", "vllm_v027"), ("0.26.0", "vllm_v026"))

_broken: str | None = None


def register() -> None:
    """Make the flag known and put the layer in stock's place; a second call changes nothing.

    Never raises: an exception here would end every vLLM process, with or without the flag. What
    goes wrong is logged, and reported when the flag asks for this backend.
    """
    global _broken
    try:
        engine = ENGINES["vllm"]
        version = engine.installed()
        if version is None or not engine.supports(version):
            logger.warning(
                "kda-dsv4-backend serves vllm %s, got %s: nothing is registered",
                engine.supported,
                version,
            )
            return
        if not _register_flag(version):
            return
        _register_layer(version)
    except Exception as error:
        _broken = f"kda-dsv4-backend could not register with vllm: {type(error).__name__}: {error}"
        logger.warning("%s", _broken)


def flag_name() -> str:
    """What ``--attention-backend`` is to be given: a name of its own where the release takes one.

    Releases that take new names are told by their signature, since source builds carry any version.
    """
    new_names = hasattr(AttentionBackendEnum, "register")
    return "KDA" if new_names else "CUSTOM"


def is_requested(vllm_config: Any) -> bool:
    """Whether the user passed the flag, for all layers or for one kind of them."""
    config = vllm_config.attention_config
    chosen = (config.backend, *config.backend_per_kind.values())
    return any(backend is not None and backend.name == flag_name() for backend in chosen)


def _register_flag(version: str) -> bool:
    """Name `SoftmaxBackend`; false where another plug-in holds the only name there is."""
    name = flag_name()
    if name == "KDA":
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, _BACKEND)
        return True
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and not custom.get_path().startswith(__name__):
        logger.warning(
            "another plug-in holds --attention-backend CUSTOM (%s), the only name that vllm %s"
            " leaves to plug-ins: kda-dsv4-backend is not registered",
            custom.get_path(),
            version,
        )
        return False
    register_backend(custom, _BACKEND)
    return True


def _register_layer(version: str) -> None:
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    form = next(module for first, module in _FORMS if Engine("vllm", first, None).supports(version))
    ours = importlib.import_module(f"kda_backend.engines.{form}").KdaLayer
    present = op_registry_oot.get(_LAYER)
    if present is None:
        PluggableLayer.register_oot(ours, name=_LAYER)
    elif present is not ours:
        raise RuntimeError(f"another plug-in replaces {_LAYER}: {present.__module__}")


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
        model = vllm_config.model_config
        linear = getattr(model.hf_text_config, "linear_attn_config", None)
        if not isinstance(linear, dict) or not linear.get("kda_layers"):
            return [
                f"--attention-backend {flag_name()} is for Kimi-Linear, whose configuration names"
                f" kda_layers, got {model.architecture}"
            ]
        if _broken is not None:
            fallback(_broken)
        if linear.get("use_full_rank_gate"):
            # their forward also exports prefill checkpoints and verifies drafts by recomputation
            fallback("Kimi-K3's KDA layers are a class of vllm that this backend does not replace")
        path = current_platform.get_attn_backend_cls(
            None,
            attn_selector_config=AttentionSelectorConfig(**config),
            num_heads=model.get_num_attention_heads(vllm_config.parallel_config),
        )
        cls._choice = resolve_obj_by_qualname(path)
        if current_platform.is_rocm():
            # ROCm reads the registered path instead of asking the class for its own.
            member = AttentionBackendEnum[flag_name()]
            register_backend(member, path)
        return []

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Module and name of the platform's choice."""
        assert cls._choice is not None  # a platform validates first
        name: tuple[str, str] = cls._choice.full_cls_name()
        return name

    @staticmethod
    def get_name() -> str:
        return flag_name()

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
