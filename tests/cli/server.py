"""A small OpenAI-compatible server over transformers' model, for the end-to-end tests."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from backend_cli.eval import recall_task as recall


class Server(ThreadingHTTPServer):
    """Serves one model in threads, one completion at a time.

    Attributes:
        requests: the bodies of all completions asked for.
        answers_left: how many it still gives before it drops every connection; ``None`` is no end.
    """

    daemon_threads = True

    def __init__(self, model: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.answers_left: int | None = None
        self.base_url = f"http://127.0.0.1:{self.server_port}"
        self._model, self._one = model, threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def answer(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """The completion, or ``None`` where none is left."""
        with self._one:
            self.requests.append(body)
            if self.answers_left is not None:
                if not self.answers_left:
                    return None
                self.answers_left -= 1
            return {"choices": [{"index": 0, "text": self._complete(body)}]}

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


_PAGES = {
    "/v1/models": {"object": "list", "data": [{"id": "recall"}]},
    "/version": {"version": "5.17.0", "engine": "transformers"},
}


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send(_PAGES.get(self.path))

    def do_POST(self) -> None:
        found = self.server.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if found is not None:
            self._send(found)

    def _send(self, answer: dict[str, Any] | None) -> None:
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


class _Stop(StoppingCriteria):
    def __init__(self, begin: int, stops: list[str]) -> None:
        self._begin, self._stops = begin, stops

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        text = recall.decode(input_ids[0, self._begin :].tolist())
        return torch.tensor([any(stop in text for stop in self._stops)])
