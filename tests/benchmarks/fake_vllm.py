"""A package ``vllm`` whose server answers recall prompts by reading them, for tests of clients.

``vllm serve`` of this package knows the routes that the benchmarks use. Environment variables make
it misbehave: ``FAKE_VLLM_WRONG=N`` answers every N-th completion wrongly, ``FAKE_VLLM_BROKEN`` ends
it at its start.
"""

import socket

SOURCE = '''
import json, os, re, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if os.environ.get("FAKE_VLLM_BROKEN"):
    raise SystemExit("broken as asked")
WRONG = int(os.environ.get("FAKE_VLLM_WRONG", "0"))
lock, count, seen, posted = threading.Lock(), [0], set(), []


def continuation(prompt):
    """What follows a prompt: the answer of its last question, then lines that never end."""
    text = bytes(prompt).decode(errors="replace")
    asked = text.rpartition("Q: ")[2].partition("\\\\nA: ")[0]
    found = re.search(re.escape(f"Q: {asked}") + r"\\\\nA: (\\\\d+)\\\\n", text)
    answer = found[1] if found else "0"
    with lock:
        count[0] += 1
        if WRONG and count[0] % WRONG == 0:
            answer = "wrong"
    return answer + "\\\\n" + "Q: and so on " * 30


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def send(self, body, kind="application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/metrics":
            page = "# HELP\\\\nvllm:num_preemptions_total{engine=\\\\"0\\\\"} 3.0\\\\n"
            page += "vllm:prefix_cache_hits_total 5.0\\\\n"
            page += "vllm:num_requests_running{engine=\\\\"0\\\\"} 0.0\\\\n"
            page += "vllm:kv_cache_usage_perc{engine=\\\\"0\\\\"} 0.0\\\\nvllm:other 7.0\\\\n"
            return self.send(page.encode(), "text/plain")
        self.send(b"")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            print("POST", self.path, json.dumps(body), flush=True)
            return self.send(b"{}")
        prompt = body["prompt"]
        text = continuation(prompt)[: body["max_tokens"]]
        if body.get("stop"):
            text = text.partition(body["stop"][0])[0]
        with lock:
            cached = len(prompt) if (body["cache_salt"], str(prompt)) in seen else 0
            seen.add((body["cache_salt"], str(prompt)))
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": cached}}
        if not body.get("stream"):
            choice = {"text": text, "finish_reason": "stop"}
            if body.get("logprobs"):
                best = [{letter: -0.1, "~": -5.0} for letter in text]
                choice["logprobs"] = {"tokens": list(text), "top_logprobs": best}
            return self.send(json.dumps({"choices": [choice], "usage": usage}).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for letter in text:
                piece = json.dumps({"choices": [{"text": letter}]})
                self.wfile.write(f"data: {piece}\\\\n\\\\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\\\\n\\\\n")
        except OSError:
            pass
        self.close_connection = True


class Server(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True


print("kda-dsv4: served by a fake", flush=True)
print("kda-dsv4: prefill grid 1 and more: two_stage_sm90 (a row of a table)", flush=True)
print("kda-dsv4: prefill two_stage: refused, two_stage_sm90 is preferred", flush=True)
Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''.replace("\\\\", "\\")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
