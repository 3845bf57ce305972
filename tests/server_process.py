"""A `homespec serve` process for tests, and the ways to talk to it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai


class ServerProcess:
    """A server on a port of its own; `log` is what it has written so far."""

    def __init__(self, model: Path, *flags: str, wait: bool = True) -> None:
        command = [sys.executable, "-m", "homespec", "serve", "-m", str(model), "-t", "1"]
        if "--port" not in flags:
            command += ["--port", "0"]
        self.process = subprocess.Popen(
            [*command, *flags], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self._lines: list[str] = []
        self._clients: list[openai.OpenAI] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            try:
                self.wait_for("Ready: ")
            except BaseException:
                self.close()
                raise
            [self.port] = map(int, re.findall(r"http://127\.0\.0\.1:(\d+)/v1", self.log))
            self.url = f"http://127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def wait_for(self, text: str, seconds: float = 60) -> None:
        until(lambda: text in self.log or self.process.poll() is not None, seconds)
        assert text in self.log, self.log

    def client(self, key: str = "none", **options: object) -> openai.OpenAI:
        made = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options
        )
        self._clients.append(made)
        return made

    def post(self, path: str, **options: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", timeout=60, trust_env=False, **options)

    def get(self, path: str, **options: object) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60, trust_env=False, **options)

    def metric(self, name: str) -> float:
        [value] = re.findall(rf"^homespec_{name} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return float(value)

    def finish(self, seconds: float = 60) -> int:
        """The exit code."""
        code = self.process.wait(seconds)
        self.close()
        return code

    def close(self) -> None:
        """End it, however it is, and all that talks to it."""
        for client in self._clients:
            client.close()
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[ServerProcess]:
    """A running server, which ends well."""
    server = ServerProcess(model, *flags)
    try:
        yield server
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            assert server.finish() == 0, server.log
    finally:
        server.close()
