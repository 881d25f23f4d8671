"""A real vLLM server in a process group of its own, for the benchmarks that ask one over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from backend_cli.eval import recall_task as recall

RECALL = Path(__file__).parents[1] / "recall"
# what a result keeps of a server's log: what this package said, and which of its modes vLLM chose
KEPT = ("kda-dsv4", "BREAKABLE_CUDAGRAPH", "Model Runner V", "model runner", "attention backend")
_ROW = re.compile(r"kda-dsv4[\w-]*: \w+ (grid \d|\w+: refused, )")
"""A row of a path table in a log: the tables of the commit have it."""
_STAMP = re.compile(r"^(\(\w+ pid=\d+\) )?(INFO|WARNING) \S+ \S+ \[[^]]+\] |^\[\d{4}-[^]]+\] ")
"""What stands before a line's text in vLLM's log and in sglang's."""
COUNTERS = (
    *("vllm:spec_decode_num", "vllm:num_preemptions", "vllm:prefix_cache"),
    *("vllm:request_success", "vllm:num_requests", "vllm:kv_cache_usage_perc"),
)


_running: set[Server] = set()


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kill what is left of a process that leads a group: an engine's workers outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end_with_servers() -> None:
    """Have SIGTERM end this process and the servers that run in it, as `Server.__exit__` would."""

    def end(number: int, _: object) -> None:
        for server in list(_running):
            end_group(server.process)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)


class Server:
    """The recall checkpoint, served from ``with`` to its end.

    Args:
        options: further arguments of ``vllm serve``.
        port: of 127.0.0.1.
        log: file for what the server prints.
        timeout: of its start, seconds.
        environment: further variables.
        model: folder of the model.

    Raises:
        RuntimeError: it ended or was not healthy in time; the message has its last lines.
    """

    COUNTED: tuple[str, ...] = COUNTERS

    def __init__(
        self,
        options: list[str],
        port: int,
        log: Path,
        timeout: float = 300.0,
        environment: dict[str, str] | None = None,
        model: Path = RECALL / "checkpoint",
    ) -> None:
        self.port, self.log, self.timeout = port, log, timeout
        self.command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--served-model-name", "recall", "--port", str(port), "--dtype", "bfloat16"),
            *options,
        ]
        self.environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            **os.environ,
            **(environment or {}),
        }
        self.start_s = 0.0

    def __enter__(self) -> Server:
        begin = time.perf_counter()
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                self.command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        _running.add(self)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        self.start_s = time.perf_counter() - begin
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        end_group(self.process)
        self.process.wait()
        _running.discard(self)

    def _wait(self) -> None:
        until = time.monotonic() + self.timeout
        while time.monotonic() < until and self.process.poll() is None:
            if self.is_ready():
                return
            time.sleep(1)
        code = self.process.poll()
        what = f"was not ready in {self.timeout:.0f} s" if code is None else f"ended with {code}"
        why = errors_in(self.log.read_text(errors="replace"))
        raise RuntimeError(f"the server {what}: {why or self.last_lines(40)}")

    def is_ready(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(urllib.error.URLError, OSError):
            self.get("/health", 2)
            return True
        return False

    def last_lines(self, count: int) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def get(self, path: str, timeout: float = 60.0) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=timeout) as response:
            return str(response.read().decode())

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 300.0) -> Any:
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps(body or {}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            text = response.read().decode()
        return json.loads(text) if text else None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counters(self) -> dict[str, float]:
        """The server's own counts: drafts, preemptions, prefix-cache tokens, requests."""
        return counters_of(self.get("/metrics"), self.COUNTED)

    def said(self) -> list[str]:
        """The log's lines about this package and the engine's modes, each once, without times and
        processes, and without rows of path tables."""
        lines = self.log.read_text(errors="replace").splitlines()
        kept = (line for line in lines if any(part in line for part in KEPT))
        found = [_STAMP.sub("", line[:300]) for line in kept if not is_row(line)]
        return list(dict.fromkeys(found))[:40]

    def shown(self) -> list[str]:
        """The command from ``serve`` on, paths from the repository's root."""
        return shown(self.command[3:])


def is_row(line: str) -> bool:
    """Whether a line of a log is about a row of a path table, which results leave out."""
    return _ROW.search(line) is not None


def errors_in(log: str) -> str:
    """The exceptions that a server's log ends tracebacks with, each once: no lines of code."""
    found = re.findall(r"(?m)(?:^|\] )(\w*(?:Error|Exception): .+)", log)
    return "; ".join(dict.fromkeys(line.strip()[:400] for line in found))


def shown(command: list[str]) -> list[str]:
    """An engine's arguments, paths from the repository's root."""
    root = RECALL.parents[1]
    return [
        str(Path(part).relative_to(root)) if part.startswith(str(root)) else part
        for part in command
    ]


def counters_of(metrics: str, counted: tuple[str, ...] = COUNTERS) -> dict[str, float]:
    """The counters of a Prometheus page whose names start so, summed over their labels."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if name.startswith(counted) and not name.endswith("_created"):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def plug_in(place: Path, name: str, group: str, function: str) -> str:
    """A search path with a distribution in ``place``, whose entry point is ``function``."""
    info = place / f"{name}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {function}\n")
    old = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(place), str(RECALL.parents[1]), *([old] if old else [])])


def plant(place: Path, group: str, function: str) -> None:
    """Put a plug-in on the search path, which calls a function in each process of an engine.

    Args:
        place: an empty folder.
        group: of the engine's entry points.
        function: ``"module:function"``.
    """
    name = function.rpartition(":")[2]
    os.environ["PYTHONPATH"] = plug_in(place, name, group, function)
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)[:2]


def completion(
    prompt: list[int], salt: str, new_tokens: int = recall.MAX_ANSWER_TOKENS, **more: Any
) -> dict[str, Any]:
    """The body of a request of greedy tokens. Prompts of one salt share the cache."""
    return {
        "model": "recall",
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0.0,
        "cache_salt": salt,
        **more,
    }


def versions(engine: str) -> dict[str, str]:
    """GPU and versions, asked of another process: this one leaves the GPU to the server."""
    code = (
        f"import json, torch, triton, {engine}; print(json.dumps(dict("
        f"gpu=torch.cuda.get_device_name(), {engine}={engine}.__version__,"
        " torch=torch.__version__, triton=triton.__version__)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found
