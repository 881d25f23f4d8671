"""A small OpenAI-compatible server over transformers' model, for the end-to-end tests."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from aiohttp import web
from transformers import StoppingCriteria, StoppingCriteriaList

from backend_cli.eval import recall_task as recall


class Server:
    """Serves one model in a thread, one completion at a time.

    Attributes:
        requests: the bodies of all completions asked for.
        answers_left: how many it still gives before it drops every connection; ``None`` is no end.
    """

    def __init__(self, model: Any, name: str = "recall") -> None:
        self.requests: list[dict[str, Any]] = []
        self.answers_left: int | None = None
        self._model, self._name = model, name
        self._worker = ThreadPoolExecutor(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        self.base_url = f"http://127.0.0.1:{started.result()}"

    def restart(self) -> None:
        """Begin anew at the same address, without a request that is still under way."""

        async def again() -> None:
            port = self._runner.addresses[0][1]
            await self._runner.cleanup()
            await self._start(port)

        asyncio.run_coroutine_threadsafe(again(), self._loop).result()
        self.requests.clear()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._worker.shutdown()

    async def _start(self, port: int = 0) -> int:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        return self._runner.addresses[0][1]

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._name}]})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "5.17.0", "engine": "transformers"})

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        if self.answers_left is not None:
            if not self.answers_left:
                request.transport.abort()
                return web.Response(status=500)
            self.answers_left -= 1
        answer = self._loop.run_in_executor(self._worker, self._complete, body)
        return web.json_response({"choices": [{"index": 0, "text": await answer}]})

    def _complete(self, body: dict[str, Any]) -> str:
        torch.set_num_threads(1)
        ids = torch.tensor([recall.encode(body["prompt"])])
        stops = body["stop"]
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=body["max_tokens"],
            do_sample=False,
            eos_token_id=recall.EOS,
            stopping_criteria=StoppingCriteriaList([_Stop(ids.shape[1], stops)]),
        )
        text = recall.decode(output[0, ids.shape[1] :].tolist())
        return text[: min((text.find(stop) for stop in stops if stop in text), default=None)]


class _Stop(StoppingCriteria):
    def __init__(self, begin: int, stops: list[str]) -> None:
        self._begin, self._stops = begin, stops

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        text = recall.decode(input_ids[0, self._begin :].tolist())
        return torch.tensor([any(stop in text for stop in self._stops)])
