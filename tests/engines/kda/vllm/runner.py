"""vLLM's own scheduler, cache manager and state of a hybrid model around KDA layers, on the CPU.

What is planted is the rest of its second runner: which row a request has, what is sampled and what
is drafted. A request's text is known beforehand, so what its drafts get wrong is, too.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.mamba.mamba_utils import (
    get_conv_copy_spec,
    get_temporal_copy_spec,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.utils import AttentionGroup

from backend_core.testing.numerics import relative_error
from tests.engines.kda.vllm.harness import bind_cache, cache_spec, hidden, run_layers
from tests.engines.kda.vllm.models import Model, build, definition_of

VOCABULARY = 97
WRONG = VOCABULARY - 1  # a token of no text
CPU = torch.device("cpu")


class OnGpu(torch.Tensor):
    """Of a tensor in host memory, which upstream asserts to be elsewhere."""

    is_cuda = True


class HybridModel(torch.nn.Module):
    """As far as `MambaHybridModelState` asks a model."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def get_mamba_state_copy_funcs(self, kinds: set[Any]) -> dict[Any, Any]:
        return dict.fromkeys(kinds, (get_conv_copy_spec, get_temporal_copy_spec))


class Runner:
    """Two layers, each with a cache group of its own, beside a group of attention.

    Attributes:
        seen: what happened: ``"preempted"``, ``"hit"``, ``"mixed"`` (drafts beside a prompt),
            ``"crossed"`` (accepted tokens end a block), ``"short"`` (fewer than drafted),
            ``"padded"`` (a batch of whole drafts with rows of nobody, as for a graph).
    """

    def __init__(
        self,
        model: Model,
        config: VllmConfig,
        blocks: int,
        seed: int,
        tolerance: float = 1e-5,
    ) -> None:
        self.config, self.model, self.random = config, model, random.Random(seed)
        self.tolerance = tolerance
        self.seen: set[str] = set()
        self.embedding = hidden(VOCABULARY, seed=5)
        self.layers = [build(model, config, index=index) for index in (0, 1)]
        for layer in self.layers:
            bind_cache(layer, config, slots=blocks)
        spec = cache_spec(self.layers[0], config)
        self.block, self.aligned = spec.block_size, spec.mamba_cache_mode == "align"
        attention = FullAttentionSpec(
            block_size=min(16, self.block), num_kv_heads=1, head_size=64, dtype=torch.bfloat16
        )
        groups = [
            KVCacheGroupSpec(["attention"], attention),
            *(KVCacheGroupSpec([layer.prefix], spec) for layer in self.layers),
        ]
        caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        config.cache_config.num_gpu_blocks = blocks
        with set_current_vllm_config(config):
            manager = StructuredOutputManager(config)
            self.scheduler = Scheduler(config, caches, manager, self.block, attention.block_size)
            self.state = MambaHybridModelState(config, HybridModel(self.layers), None, CPU)
            self.groups: list[list[Any]] = [[]]
            for number, layer in enumerate(self.layers, 1):
                group = AttentionGroup(layer.get_attn_backend(), [layer.prefix], spec, number)
                group.create_metadata_builders(config, CPU)
                self.groups.append([group])
        rows = config.scheduler_config.max_num_seqs
        longest = config.model_config.max_model_len
        self.tables = BlockTables(
            [attention.block_size, self.block, self.block],
            rows,
            config.scheduler_config.max_num_batched_tokens,
            [-(-longest // attention.block_size)] * 3,
            CPU,
        )
        self.caches = caches
        self.state.initialize_kv_cache(caches, self.tables)
        self.computed = torch.zeros(rows, dtype=torch.int32)
        self.row_of: dict[str, int] = {}
        self.prefill_len: dict[str, int] = {}
        self.texts: dict[str, list[int]] = {}
        self.definitions: dict[tuple[int, ...], torch.Tensor] = {}
        init_none_hash(sha256)
        self._hash = get_request_block_hasher(attention.block_size, sha256)

    def add(self, name: str, text: list[int], prompt: int) -> None:
        """A request whose answer to the first ``prompt`` tokens is the rest of ``text``."""
        answer = len(text) - prompt
        text = [*text, *[0] * (2 + self.config.num_speculative_tokens)]  # drafted past its end
        self.texts[name] = text
        key = tuple(text)
        if key not in self.definitions:
            self.definitions[key] = definition_of(self.model).run(self.embedding[text])
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        params.update_from_generation_config({}, None)
        request = Request(name, text[:prompt], params, None, block_hasher=self._hash)
        self.scheduler.add_request(request)

    def run(self, most: int = 400) -> None:
        """Until all requests have their answers."""
        for _ in range(most):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("requests wait")

    def step(self) -> None:
        planned = self.scheduler.schedule()
        self._follow(planned)
        names = list(planned.num_scheduled_tokens)
        self.random.shuffle(names)
        names.sort(key=lambda name: planned.num_scheduled_tokens[name])
        if not names:
            return
        drafts = planned.scheduled_spec_decode_tokens
        lengths = [planned.num_scheduled_tokens[name] for name in names]
        rows = [self.row_of[name] for name in names]
        before = self.computed[rows].tolist()
        pad = 0
        if set(lengths) == {1 + self.config.num_speculative_tokens}:
            pad = self.random.randint(0, 2)
            self.seen |= {"padded"} if pad else set()
        mode = CUDAGraphMode.FULL if pad else CUDAGraphMode.NONE
        batch = self._batch(names, rows, lengths, before, drafts, pad)
        padded = sum(lengths) + pad * lengths[0]
        with set_current_vllm_config(self.config):
            tables = self.tables.gather_block_tables(batch.idx_mapping, len(names) + pad)
            self.state.preprocess_state(batch, tables, self.caches, self.computed)
            metadata = self.state.prepare_attn(
                *(batch, mode, tables),
                torch.zeros(3, padded, dtype=torch.int64),
                self.groups,
                self.caches,
            )
        tokens: list[int] = []
        for name, length, begin in zip(names, lengths, before, strict=True):
            own = self.texts[name][begin : begin + length - len(drafts.get(name, []))]
            tokens += [*own, *drafts.get(name, [])]
        tokens += [0] * (padded - len(tokens))
        of_layers = [metadata[layer.prefix] for layer in self.layers]
        outputs = run_layers(self.layers, self.config, self.embedding[tokens], of_layers)
        if of_layers[0].num_spec_decodes and of_layers[0].num_prefills:
            self.seen.add("mixed")
        answers: list[list[int]] = []
        at = 0
        for row, name, length, begin in zip(rows, names, lengths, before, strict=True):
            good, answer = self._accepted(name, tokens[at : at + length], begin)
            want = self.definitions[tuple(self.texts[name])][begin : begin + good]
            for output in outputs:
                assert relative_error(output[at : at + good], want) < self.tolerance, (
                    name,
                    begin,
                    good,
                )
            if name in drafts and good < length:
                self.seen.add("short")
            if name in drafts and begin // self.block < (begin + good) // self.block:
                self.seen.add("crossed")
            self.computed[row] = begin + good
            answers.append(answer)
            at += length
        sampled = torch.tensor([len(answer) for answer in answers], dtype=torch.int32)
        self.state.postprocess_state(batch.idx_mapping, sampled, self.computed)
        self.scheduler.update_from_output(
            planned,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: n for n, name in enumerate(names)},
                sampled_token_ids=answers,
            ),
        )
        self._draft(names)

    def _follow(self, planned: Any) -> None:
        """Requests that leave their rows, and that come or come back."""
        if planned.preempted_req_ids:
            self.seen.add("preempted")
        for name in {*planned.finished_req_ids, *(planned.preempted_req_ids or ())}:
            self.row_of.pop(name, None)
        for new in planned.scheduled_new_reqs:
            free = set(range(len(self.computed))) - set(self.row_of.values())
            row = self.row_of[new.req_id] = self.random.choice(sorted(free))
            self.prefill_len[new.req_id] = len(new.prefill_token_ids)
            self.computed[row] = new.num_computed_tokens
            if new.num_computed_tokens:
                self.seen.add("hit")
            self.state.add_request(row, new)
            self.tables.append_block_ids(row, new.block_ids, overwrite=True)
        cached = planned.scheduled_cached_reqs
        assert not cached.resumed_req_ids
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None:
                self.tables.append_block_ids(self.row_of[name], blocks, overwrite=False)
        self.tables.apply_staged_writes()

    def _batch(
        self,
        names: list[str],
        rows: list[int],
        lengths: list[int],
        before: list[int],
        drafts: dict[str, list[int]],
        pad: int,
    ) -> Any:
        bounds = np.cumsum([0, *lengths]).astype(np.int32)
        bounds = np.concatenate([bounds, np.full(pad, bounds[-1], np.int32)])
        seq_lens = torch.tensor([a + b for a, b in zip(before, lengths, strict=True)] + [0] * pad)
        seq_lens = seq_lens.to(torch.int32).as_subclass(OnGpu)
        prefilling = np.array(
            [n < self.prefill_len[name] for n, name in zip(before, names, strict=True)]
        )
        drafted = np.array([len(drafts.get(name, [])) for name in names], np.int32)
        scheduled = np.array(lengths, np.int32)
        return SimpleNamespace(
            num_reqs=len(names),
            num_tokens=sum(lengths),
            num_reqs_after_padding=len(names) + pad,
            num_tokens_after_padding=sum(lengths) + pad * lengths[0],
            idx_mapping=torch.tensor(rows, dtype=torch.int32),
            query_start_loc=torch.from_numpy(bounds),
            query_start_loc_np=bounds,
            max_query_len=None,
            num_scheduled_tokens=scheduled,
            num_draft_tokens_per_req=drafted,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.as_subclass(torch.Tensor),
            dcp_local_seq_lens=None,
            positions=None,
            prompt_lens=None,
            is_prefilling_np=prefilling,
            # as the runner has it: a prompt's next token by itself, drafts behind it or not
            prefill_runs_as_decode_np=prefilling
            & (scheduled - drafted == 1)
            & (np.array(before) > 0),
        )

    def _accepted(self, name: str, tokens: list[int], begin: int) -> tuple[int, list[int]]:
        """How many tokens of a step are the text's, and what is sampled behind them."""
        text = self.texts[name]
        good = 0
        while good < len(tokens) and text[begin + good] == tokens[good]:
            good += 1
        first = max(begin + 1, self.prefill_len[name])
        return good, text[first : begin + good + 1]

    def _draft(self, names: list[str]) -> None:
        """Up to as many tokens as may be drafted, of which the last may be wrong."""
        most = self.config.num_speculative_tokens
        proposed = []
        for name in names:
            request = self.scheduler.requests.get(name)
            known = 0 if request is None else request.num_tokens
            right = self.texts[name][known : known + self.random.randint(0, most)]
            wrong = [WRONG] * self.random.randint(0, most - len(right))
            proposed.append(right + wrong)
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, proposed))
