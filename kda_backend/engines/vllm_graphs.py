"""vLLM: prefill steps of KDA models in CUDA graphs of more sizes.

vLLM captures steps of up to 512 tokens by default; a longer one takes what its host needs. With
this package's flag the sizes of `prefill_graphs` are captured too. What the user says of sizes,
modes or eager execution stays as it is, and so do servers of a kind for which no time was measured.

The sizes are of steps with prefills. vLLM would capture its graphs of decodes alone in them too,
whose attention keeps memory for each token; these stay what they are without the flag.

A graph of a step with prefills breaks at each KDA layer upstream. Here a second graph of each size
holds these layers too (`vllm_tables`), and is replayed where the step's requests fit its tables.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from backend_core.engines import seams
from backend_core.engines.in_place import in_place_of
from backend_core.engines.vllm_flag import batch_invariant, requested, say
from kda_backend.engines.prefill_graphs import most_tokens, sizes
from kda_backend.engines.vllm_seams import VLLM_CAPTURE, VLLM_GRAPHS
from kda_backend.family import model_refusal

_TABLES = "_kda_dsv4_tables"  # on a CudaGraphManager
_OF_DECODES = "_kda_dsv4_of_decodes"  # on a CompilationConfig: tokens of the largest such graph


def install(config_module: ModuleType) -> None:
    """Let ``VllmConfig`` of vLLM's module ``vllm.config.vllm`` add the sizes to its own; a second
    call changes nothing."""
    upstream = getattr(config_module.VllmConfig, "_set_cudagraph_sizes", None)
    if upstream is None:
        return

    @in_place_of(config_module.VllmConfig, "_set_cudagraph_sizes")
    def set_sizes(self: Any) -> None:
        compilation = self.compilation_config
        said = (compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size)
        upstream(self)
        if said == (None, None) and requested(self) is not None and refusal(self) is None:
            add_sizes(self, upstream)


def leave_decodes(runner_module: ModuleType) -> None:
    """Let ``CudaGraphManager`` of vLLM's module ``vllm.v1.worker.gpu.cudagraph_utils`` capture the
    added sizes for steps with prefills alone; a second call changes nothing."""
    upstream = getattr(runner_module.CudaGraphManager, "_init_candidates", None)
    if upstream is None:
        return

    @in_place_of(runner_module.CudaGraphManager, "_init_candidates")
    def init_candidates(self: Any) -> None:
        upstream(self)
        most = getattr(self.compilation_config, _OF_DECODES, None)
        if most is None:
            return
        full = runner_module.CUDAGraphMode.FULL

        def kept(graphs: list[Any]) -> list[Any]:
            return [one for one in graphs if one.cg_mode != full or one.num_tokens <= most]

        for table in (self._capture_descs, self._candidates):
            for key, graphs in table.items():
                table[key] = kept(graphs)


def capture_layers(runner_module: ModuleType) -> None:
    """Let ``CudaGraphManager`` of vLLM's module ``vllm.v1.worker.gpu.cudagraph_utils`` capture a
    second graph of each step with prefills, with the KDA layers inside; a second call changes
    nothing."""
    if seams.difference(VLLM_CAPTURE) is not None:
        return
    manager = runner_module.CudaGraphManager
    init, run = manager.init_breakable_cg_runner, manager.run_pw_graph

    @in_place_of(manager, "init_breakable_cg_runner")
    def init_runner(self: Any, model: Any, key_fn: Any = None) -> None:
        if (
            self.breakable_cg_runner is None
            and key_fn is None
            and not batch_invariant()  # bits on tables have not been compared
            and refusal(self.vllm_config) is None
            and seams.refusal(VLLM_CAPTURE) is None
        ):
            tables = _tables_of(model, self.device)
            if tables is not None:
                setattr(self, _TABLES, tables)
                key_fn = _runs_on_tables
        init(self, model, key_fn)

    @in_place_of(manager, "run_pw_graph")
    def run_graph(self: Any, model: Any, model_inputs: dict[str, Any]) -> Any:
        tables = vars(self).get(_TABLES)
        if tables is None:
            return run(self, model, model_inputs)
        from vllm.forward_context import get_forward_context

        from kda_backend.engines.vllm_tables import run_on

        context = get_forward_context()
        if self._graphs_captured:
            if tables.fill(context.attn_metadata):
                run_on(tables)
            return run(self, model, model_inputs)
        output = run(self, model, model_inputs)
        tables.clear()
        run_on(tables)
        mode = context.cudagraph_runtime_mode
        context.cudagraph_runtime_mode = runner_module.CUDAGraphMode.NONE
        context.moe_layer_index = 0
        model(**model_inputs)  # so that nothing is compiled or allocated during the capture
        context.cudagraph_runtime_mode = mode
        context.moe_layer_index = 0
        run(self, model, model_inputs)
        return output


def _tables_of(model: Any, device: Any) -> Any:
    """The tables of a model's KDA layers; ``None`` without layers of ours, or where they do not
    break graphs."""
    from kda_backend.engines.vllm_tables import StepTables

    runtimes = [
        runtime
        for layer in model.modules()
        if getattr(layer, "captured_on_tables", False)
        and (runtime := getattr(layer, "kda_runtime", None)) is not None
    ]
    return StepTables(runtimes[0], device) if runtimes else None


def _runs_on_tables(**_: Any) -> bool:
    """Which of a size's two graphs a pass captures or replays."""
    from kda_backend.engines.vllm_tables import tables_of_pass

    return tables_of_pass() is not None


def add_sizes(config: Any, resolve: Any) -> None:
    """Add the sizes to those that vLLM has chosen, and have vLLM resolve the list.

    Args:
        config: a ``VllmConfig`` whose default sizes are resolved.
        resolve: upstream's ``_set_cudagraph_sizes``.
    """
    compilation, parallel = config.compilation_config, config.parallel_config
    ranks = parallel.tensor_parallel_size
    hidden_size = config.model_config.get_hidden_size()
    most = most_tokens(hidden_size, ranks, config.scheduler_config.max_num_batched_tokens)
    own = compilation.cudagraph_capture_sizes
    larger = [size for size in sizes(most) if size > own[-1]]
    if not larger:
        return
    setattr(compilation, _OF_DECODES, own[-1])
    compilation.cudagraph_capture_sizes = [*own, *larger]
    compilation.max_cudagraph_capture_size = None
    resolve(config)
    say(
        f"prefill steps of up to {larger[-1]} tokens run in CUDA graphs, {len(larger)} sizes more"
        f" than vLLM's {len(own)} up to {own[-1]}, by the model's hidden size of {hidden_size} and"
        f" {ranks} rank{'s' * (ranks > 1)} (--cudagraph-capture-sizes or"
        " --max-cudagraph-capture-size sets them by hand)"
    )


def refusal(config: Any) -> str | None:
    """Why the sizes stay vLLM's, or ``None``."""
    if (reason := seams.refusal(VLLM_GRAPHS)) is not None:
        say(f"prefill graphs keep vLLM's sizes: {reason}")
        return reason
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    compilation, parallel = config.compilation_config, config.parallel_config
    model = config.model_config
    if model is None or not current_platform.is_cuda():
        return "no model on a CUDA GPU"
    if model_refusal(model.hf_config.to_dict()) and model_refusal(model.hf_text_config.to_dict()):
        return "no KDA layers"
    if not getattr(config, "use_v2_model_runner", False):
        return "the first model runner"
    if not compilation.cudagraph_capture_sizes or not is_breakable_cudagraph_enabled():
        return "no breakable CUDA graphs"
    if compilation.cudagraph_mode.mixed_mode() != CUDAGraphMode.PIECEWISE:
        return "steps with prefills run outside of piecewise graphs"
    others = (
        *(parallel.pipeline_parallel_size, parallel.data_parallel_size),
        *(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size),
    )
    if max(others) > 1 or parallel.use_ubatching:
        return "another parallelism than tensor parallelism"
    if config.lora_config is not None:
        return "LoRA, for which each size is captured several times"
    return None
