"""The known bug that the recall checkpoint must be able to see.

Engines store the recurrent state as [V, K]. A kernel that read it as [K, V] once cost Kimi-Linear
most of its GSM8K accuracy (17.36 % against 90.37 %), with fluent text and no error message.
"""

from collections.abc import Callable

import torch

CHUNK = 64
ChunkKda = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def with_transposed_state(chunk_kda: ChunkKda) -> ChunkKda:
    """Plant the bug in a right ``chunk_kda``: outputs read earlier chunks' state transposed.

    The state itself is updated as it should be. In a chunk that starts from the state S, with the
    cumulative log decay G, a token's output is scale·(exp(G)·q) S + (terms inside the chunk); the
    bug puts the transpose of S there. ``chunk_kda`` is called as transformers calls it: q, k and v
    [B, T, H, D], g [B, T, H, D] as log decay, beta [B, T, H], states [B, H, D, D]. Keys and values
    have one size, or the bug could not go unnoticed.
    """

    def buggy_chunk_kda(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = True,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        state, outputs = initial_state, []
        for start in range(0, q.shape[1], CHUNK):
            part = slice(start, start + CHUNK)
            output, new_state = chunk_kda(
                q[:, part].contiguous(),
                k[:, part].contiguous(),
                v[:, part].contiguous(),
                g=g[:, part].contiguous(),
                beta=beta[:, part].contiguous(),
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )
            if state is not None:
                query = q[:, part].float()
                query = query * (query.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
                query = query * q.shape[-1] ** -0.5 * g[:, part].float().cumsum(1).exp()
                difference = state.float().mT - state.float()
                output = output + torch.einsum("bthk,bhkv->bthv", query, difference).to(output)
            state = new_state
            outputs.append(output)
        return torch.cat(outputs, 1), state if output_final_state else None

    return buggy_chunk_kda
