"""Drafts of vLLM's KDA layers as records in place of states: less memory, so more requests.

vLLM keeps the state after each drafted token in a block of its cache. Kimi-K3's layer alone has
records instead, under ``--use-replayssm``, which vLLM takes for Kimi-Linear too, whose layer has
none. Here the layer of any model has them, of 1 KiB per token and head, for all requests that may
run. What commits them is vLLM's: its runner asks the metadata of a step to do so once tokens
are sampled, and Kimi-K3's kernels fold the records of all layers of a cache group into states and
compact the convolution's windows. So between steps a block is what it is without drafts: it can be
cached, preempted or handed over.

States in float16 are folded by this package's kernel (`vllm_fold`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.recoverssm_metadata import (
    RecoverSSMMetadata,
    RecoverSSMPostprocessMetadata,
)
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.model_states.recoverssm import RecoverSSMState

from backend_core.engines.in_place import in_place_of
from backend_core.engines.vllm_flag import say
from kda_backend.contract.values import Records
from kda_backend.engines import vllm_fold
from kda_backend.engines.draft_records import VARIABLE, LayerGates


@dataclass
class LayerRecords:
    """Records of the drafts that one step verifies, in one layer.

    Attributes:
        correction, key_gate: as in `Records`, ``[max_num_seqs, ..]``; the row is the number of the
            draft in the step.
        lower_bound: of the layer's gate; ``None`` without one.
        by_norm: as in `Records`; true where this package folds them.
        committed: vLLM's runner commits what a step records.
    """

    correction: torch.Tensor
    key_gate: torch.Tensor
    lower_bound: float | None
    by_norm: bool = False
    committed: bool = False


def records_for(vllm_config: Any, module: Any, lower_bound: float | None) -> LayerRecords:
    """Memory for the drafts of one layer, which the runner is told to commit.

    Args:
        module: the engine's layer: its heads.
    """
    _commit_in_runner()
    number, drafted = vllm_config.scheduler_config.max_num_seqs, vllm_config.num_speculative_tokens
    made = Records.empty(
        (number,),
        1 + drafted,
        heads=module.local_num_heads,
        key_dim=module.head_dim,
        value_dim=module.head_dim,
        dtype=vllm_config.model_config.dtype,
        device=torch.device(vllm_config.device_config.device_type),
    )
    size = sum(x.nbytes for x in made[:2])
    say(
        f"drafts of {1 + drafted} tokens take no blocks of the cache: they are kept as records of"
        f" {size / number / 2**10:.0f} KiB per request and layer, and those of {number} requests"
        f" (--max-num-seqs) take {size / 2**20:.0f} MiB in each KDA layer"
    )
    return LayerRecords(*made[:2], lower_bound, module.get_state_dtype()[1] == torch.float16)


def _commit_in_runner() -> None:
    """Let ``MambaHybridModelState``, which the runner makes once a model is built, commit records
    of ours as it does Kimi-K3's; a second call changes nothing."""
    upstream = MambaHybridModelState.__init__

    @in_place_of(MambaHybridModelState, "__init__")
    def init(self: Any, vllm_config: Any, model: Any, *args: Any, **options: Any) -> None:
        upstream(self, vllm_config, model, *args, **options)
        kept = (getattr(layer, "recoverssm_records", None) for layer in model.modules())
        for records in kept:
            if isinstance(records, LayerRecords):
                records.committed = True
                self.recoverssm = self.recoverssm or RecoverSSMState()


@dataclass
class Commit:
    """Values for the commit of one step of a cache group, beside its metadata.

    Attributes:
        group: of layers, as upstream's commit knows them.
        requests: ``[N]`` int32, the step's rows of the drafts; ``None`` where they come first.
        blocks: ``[rows, blocks]``, the group's table, with a prefix cache; else ``None``.
        computed: ``[rows]``, tokens before the step; block_size: in tokens.
    """

    group: CommitGroup
    requests: torch.Tensor | None
    blocks: torch.Tensor | None
    computed: torch.Tensor
    block_size: int


@dataclass
class RecordsMetadata(GDNAttentionMetadata, RecoverSSMMetadata):  # type: ignore[misc]
    """Upstream's metadata of a step, of layers that keep records."""

    kda_commit: Commit | None = None

    def commit_recoverssm_state(
        self, num_accepted_tokens: torch.Tensor
    ) -> RecoverSSMPostprocessMetadata | None:
        """Bring states and windows up to date; ``num_accepted_tokens [rows]``, with the token
        sampled last. Called by the runner once for each step."""
        return _commit_all(self._commit, num_accepted_tokens)

    def _commit(self, num_accepted_tokens: torch.Tensor) -> RecoverSSMPostprocessMetadata | None:
        commit, number = self.kda_commit, self.num_spec_decodes
        if commit is None:
            return None
        slots, bounds = self.spec_state_indices_tensor, self.spec_query_start_loc
        assert slots is not None and bounds is not None
        aligned = commit.blocks is not None
        commit.group.context().commit(
            num_accepted_tokens,
            slots[:number, 0],
            bounds[: number + 1],
            request_indices=commit.requests,
            block_table=commit.blocks,
            num_computed_tokens=commit.computed if aligned else None,
            mamba_block_size=commit.block_size if aligned else None,
        )
        if commit.blocks is None:
            return None
        return RecoverSSMPostprocessMetadata(
            num_spec_decodes=number,
            request_indices=commit.requests,
            block_table=commit.blocks,
            num_computed_tokens=commit.computed,
            block_size=commit.block_size,
        )


def _commit_all(
    commit: Callable[[torch.Tensor], RecoverSSMPostprocessMetadata | None],
    num_sampled: torch.Tensor,
) -> RecoverSSMPostprocessMetadata | None:
    """Let ``commit`` accept the first token of each draft whatever is sampled behind it: a prompt's
    token in a step by itself runs as a draft, of which nothing is sampled unless it is the prompt's
    last."""
    accepted = num_sampled.clamp(min=1)
    found = commit(accepted)
    if found is None:
        return None
    # to which the runner adds what was sampled, for the tokens that the states hold; a graph's
    # batch has rows more, of nobody
    computed = found.num_computed_tokens[: len(accepted)] + (accepted - num_sampled)
    return dataclasses.replace(found, num_computed_tokens=computed)


class CommitGroup:
    """Layers that share slots, as upstream's commit of Kimi-K3 knows its own.

    Raises:
        RuntimeError: nothing commits their records.
    """

    def __init__(self, vllm_config: Any, layer_names: list[str]) -> None:
        known = vllm_config.compilation_config.static_forward_context
        self._layers = [known[name] for name in layer_names]
        self._context: Any = None
        self._gates: LayerGates | None = None
        self._sizes = {
            "spec_query_len": 1 + vllm_config.num_speculative_tokens,
            "max_num_reqs": vllm_config.scheduler_config.max_num_seqs,
        }
        if not all(layer.recoverssm_records.committed for layer in self._layers):
            raise RuntimeError(
                "the KDA layers keep records of drafts, which this model's runner does not commit:"
                f" serve with {VARIABLE}=0 and without --use-replayssm"
            )

    def context(self) -> Any:
        """Upstream's ``KDARecoverSSMCommitContext``, with the weights as they are now: an engine
        may load them anew."""
        from vllm.models.kimi_k3.nvidia.ops.recoverssm import KDARecoverSSMCommitContext

        if self._context is None:
            layers = [_as_kimi_k3s(layer) for layer in self._layers]
            first = self._layers[0]
            folded_here = first.recoverssm_records.by_norm
            self._context = KDARecoverSSMCommitContext.create(
                layers, **self._sizes, backend="cute" if folded_here else "triton"
            )
            if folded_here:
                vllm_fold.install(self._context, first.kda_runtime.selection, layers)
            self._gates = LayerGates(layers, self._context.A_log, self._context.dt_bias)
        assert self._gates is not None
        self._gates.read()
        return self._context


def _as_kimi_k3s(layer: Any) -> SimpleNamespace:
    """The attributes that upstream's commit reads of a layer of Kimi-K3."""
    return SimpleNamespace(
        kv_cache=layer.kv_cache,
        recoverssm_records=layer.recoverssm_records,
        A_log=layer.A_log.data.view(-1),
        dt_bias=layer.dt_bias.data.view(layer.local_num_heads, layer.head_dim),
        local_num_heads=layer.local_num_heads,
        head_dim=layer.head_dim,
        gate_lower_bound=layer.recoverssm_records.lower_bound,
    )


def committing(records: Any, backend: Any) -> Any:
    """A subclass of a backend of vLLM's, whose metadata commits ``records``: ours, or those of
    Kimi-K3, which upstream's metadata commits."""
    return (_recording if isinstance(records, LayerRecords) else _recorded)(backend)


@functools.cache
def _recorded(backend: Any) -> Any:
    upstream: Any = backend.get_builder_cls()

    class Builder(upstream):  # type: ignore[misc]
        def build(self, *args: Any, **options: Any) -> Any:
            metadata = super().build(*args, **options)
            commit = metadata.commit_recoverssm_state
            metadata.commit_recoverssm_state = functools.partial(_commit_all, commit)
            return metadata

    return _with_builder(backend, Builder)


@functools.cache
def _recording(backend: Any) -> Any:
    upstream: Any = backend.get_builder_cls()

    class Builder(upstream):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            # upstream has a slot for each drafted token; a CUDA graph reads this one
            slots = vars(self)["spec_state_indices_tensor"]
            self.spec_state_indices_tensor: torch.Tensor = slots[:, :1].contiguous()
            self._group = CommitGroup(self.vllm_config, self.layer_names)

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **options: Any
        ) -> Any:
            m = common_attn_metadata
            if not self._aligned:
                m = m.replace(block_table_tensor=m.block_table_tensor[:, :1])
            built = super().build(common_prefix_len, m, *args, **options)
            metadata = RecordsMetadata(
                **{x.name: getattr(built, x.name) for x in dataclasses.fields(built)}
            )
            metadata.__dict__.update(vars(built))  # with what is kept beside the fields
            requests = None
            if built.num_prefills or built.num_decodes:
                masks = built.spec_sequence_masks_cpu
                if masks is not None:
                    requests = async_tensor_h2d(
                        masks.nonzero().flatten(), m.query_start_loc.device, torch.int32
                    )
            return self._with_commit(
                metadata, m.block_table_tensor, requests, m.compute_num_computed_tokens()
            )

        def update_block_table(
            self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor
        ) -> Any:
            """Metadata of another cache group, with the same requests."""
            blocks = blk_table if self._aligned else blk_table[:, :1]
            updated = super().update_block_table(metadata, blocks, slot_mapping)
            if (commit := metadata.kda_commit) is None:
                return updated
            return self._with_commit(updated, blocks, commit.requests, commit.computed)

        @property
        def _aligned(self) -> bool:
            return bool(self.kv_cache_spec.mamba_cache_mode == "align")

        def _with_commit(
            self,
            metadata: RecordsMetadata,
            blocks: torch.Tensor,
            requests: torch.Tensor | None,
            computed: torch.Tensor,
        ) -> RecordsMetadata:
            if not metadata.num_spec_decodes:
                return metadata
            kept = blocks if self._aligned else None
            size = self.kv_cache_spec.block_size
            metadata.kda_commit = Commit(self._group, requests, kept, computed, size)
            return metadata

    return _with_builder(backend, Builder)


def _with_builder(backend: Any, builder: Any) -> Any:
    class Backend(backend):  # type: ignore[misc]
        @staticmethod
        def get_builder_cls() -> Any:
            return builder

    Backend.__qualname__ = f"Commits{backend.__qualname__}"
    return Backend
