"""A small hub over real HTTP, for the real huggingface_hub client, with faults to switch on.

    with HubServer() as hub:
        file = hub.add("user/repo", "model.gguf", path)
        file.faults.cut_after = 1_000_000

It answers `/api/models/...` (model info, tree), `/user/repo/resolve/REVISION/file` with a redirect
to a signed address on another host name (as the hub does for large files), ETag, X-Linked-Etag,
X-Linked-Size, X-Repo-Commit and Range, and streams files from the disk. `hub.requests` keeps what
was asked, `file.bytes_sent` the bytes of content that went out.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

BLOCK_BYTES = 64 << 10


@dataclass
class Faults:
    """What goes wrong with one file; the counters say how many times before it works."""

    gated: bool = False
    private: bool = False  # wants the token in `HubServer.token`
    forbidden: bool = False
    rate_limited: int = 0
    retry_after: str | None = "0"
    broken: int = 0  # answers of `broken_status`
    broken_status: int = 503
    cut_after: int | None = None  # close the connection after so many bytes of an answer
    cuts: int = 1
    corrupt_at: int | None = None  # flip this byte of the file
    corruptions: int = 1
    no_ranges: bool = False
    bytes_per_second: float | None = None
    hang_seconds: float = 0.0
    etag: str | None = None
    no_commit: bool = False

    def take(self, counter: str) -> bool:
        left = getattr(self, counter)
        if left > 0:
            setattr(self, counter, left - 1)
        return bool(left > 0)


@dataclass
class ServedFile:
    repo: str
    name: str
    path: Path
    size: int
    sha256: str
    lfs: bool = True
    faults: Faults = field(default_factory=Faults)
    bytes_sent: int = 0
    reads: int = 0  # answers that began to send content


@dataclass(frozen=True)
class Seen:
    method: str
    host: str
    path: str
    headers: Message


class HubServer:
    """Serves repositories on 127.0.0.1; large files from the same port under the name localhost."""

    branch = "main"
    token = "hf_right"  # no secret: the word that private repositories ask for

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], ServedFile] = {}
        self.commits: dict[str, str] = {}
        self.requests: list[Seen] = []
        self.lock = threading.Lock()
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.hub = self

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(
        self,
        repo: str,
        name: str,
        path: Path,
        *,
        lfs: bool = True,
        commit: str = "c0ffee" + 34 * "0",
    ) -> ServedFile:
        digest = hashlib.sha256()
        with path.open("rb") as source:
            while block := source.read(1 << 20):
                digest.update(block)
        served = ServedFile(repo, name, path, path.stat().st_size, digest.hexdigest(), lfs)
        self.files[repo, name] = served
        self.commits[repo] = commit
        return served

    def asked(self, method: str, part: str) -> list[Seen]:
        return [seen for seen in self.requests if seen.method == method and part in seen.path]

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    hub: HubServer

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that are killed are what is tested: no traceback."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        # Small buffers: what is counted as sent has nearly all arrived.
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().setup()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        host = self.headers.get("Host", "")
        with hub.lock:
            hub.requests.append(Seen(self.command, host, self.path, self.headers))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/(?:revision|tree)/([^/]+))?", path):
            self._api(match[1], match[2] or "", match[3] or hub.branch)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/lfs/([^/]+/[^/]+)/(.+)", path):
            self._lfs(match[1], match[2])
        elif path == "/round":
            self._refuse(302, Location="/round")
        else:
            self._refuse(404)

    # -- answers without content

    def _refuse(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if code:
            self.send_header("X-Error-Code", code)
        if message:
            self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _has_repo(self, repo: str, revision: str) -> bool:
        hub = self.server.hub
        if repo not in hub.commits:
            # The hub hides which private repositories exist: 401 to those without a token.
            known = "Authorization" in self.headers
            self._refuse(404 if known else 401, "RepoNotFound", "Repository not found")
            return False
        if revision not in (hub.branch, hub.commits[repo]):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return False
        return True

    def _refused(self, file: ServedFile) -> bool:
        """Whether a switched-on fault answered the request."""
        faults, given = file.faults, self.headers.get("Authorization")
        if faults.hang_seconds:
            time.sleep(faults.hang_seconds)
        if faults.gated:
            self._refuse(403 if given else 401, "GatedRepo", "Access to model is restricted")
        elif faults.private and given != f"Bearer {self.server.hub.token}":
            message = "Invalid credentials in Authorization header" if given else ""
            self._refuse(401, "" if given else "RepoNotFound", message)
        elif faults.forbidden:
            self._refuse(403)
        elif faults.take("rate_limited"):
            headers = {"Retry_After": faults.retry_after} if faults.retry_after else {}
            self._refuse(429, **headers)
        elif faults.take("broken"):
            self._refuse(faults.broken_status)
        else:
            return False
        return True

    # -- the API

    def _api(self, repo: str, kind: str, revision: str) -> None:
        hub = self.server.hub
        if not self._has_repo(repo, revision):
            return
        files = [file for (known, _), file in hub.files.items() if known == repo]
        if any(self._refused(file) for file in files):
            return
        if kind.startswith("/tree"):
            body: object = [
                {"type": "file", "path": f.name, "size": f.size, "oid": f.sha256[:40]}
                | ({"lfs": self._lfs_info(f, "oid")} if f.lfs else {})
                for f in files
            ]
        else:
            blobs = "blobs" in parse_qs(urlsplit(self.path).query)
            body = {
                "_id": "1",
                "id": repo,
                "modelId": repo,
                "sha": hub.commits[repo],
                "private": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": [
                    {"rfilename": f.name}
                    | ({"size": f.size, "blobId": f.sha256[:40]} if blobs else {})
                    | ({"lfs": self._lfs_info(f, "sha256")} if blobs and f.lfs else {})
                    for f in files
                ],
            }
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    @staticmethod
    def _lfs_info(file: ServedFile, digest_key: str) -> dict[str, object]:
        return {digest_key: file.sha256, "size": file.size, "pointerSize": 134}

    # -- files

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        hub = self.server.hub
        if not self._has_repo(repo, revision):
            return
        file = hub.files.get((repo, name))
        if file is None:
            self._refuse(404, "EntryNotFound", "Entry not found", X_Repo_Commit=hub.commits[repo])
            return
        if self._refused(file):
            return
        etag = file.faults.etag or f'"{file.sha256 if file.lfs else file.sha256[:40]}"'
        headers = {} if file.faults.no_commit else {"X-Repo-Commit": hub.commits[repo]}
        if not file.lfs:
            self._content(file, {**headers, "ETag": etag})
            return
        self.send_response(302)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("X-Linked-Etag", etag)
        self.send_header("X-Linked-Size", str(file.size))
        self.send_header("Location", f"http://localhost:{hub.port}/lfs/{repo}/{name}?signature=1")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _lfs(self, repo: str, name: str) -> None:
        file = self.server.hub.files.get((repo, name))
        if file is None:
            self._refuse(404)
        elif "Authorization" in self.headers:
            self._refuse(400)  # as storage hosts answer to a second kind of credentials
        else:
            self._content(file, {"ETag": f'"{file.sha256}"'})

    def _content(self, file: ServedFile, headers: dict[str, str]) -> None:
        start, stop, partial = 0, file.size, False
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        fresh = self.headers.get("If-Range", headers["ETag"]) == headers["ETag"]
        if wanted and fresh and not file.faults.no_ranges:
            start, partial = int(wanted[1]), True
            stop = min(int(wanted[2]) + 1, file.size) if wanted[2] else file.size
            if start >= file.size:
                self._refuse(416, Content_Range=f"bytes */{file.size}")
                return
        self.send_response(206 if partial else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{file.size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "GET":
            file.reads += 1
            with suppress(OSError):  # the client went away
                self._send(file, start, stop)

    def _send(self, file: ServedFile, start: int, stop: int) -> None:
        faults, began, sent = file.faults, time.monotonic(), 0
        cut = faults.cut_after if faults.cut_after is not None and faults.take("cuts") else None
        for block in _blocks(file, start, stop):
            if cut is not None and sent + len(block) > cut:
                self.wfile.write(block[: cut - sent])
                file.bytes_sent += cut - sent
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.wfile.write(block)
            sent += len(block)
            with self.server.hub.lock:
                file.bytes_sent += len(block)
            if faults.bytes_per_second:
                ahead = sent / faults.bytes_per_second - (time.monotonic() - began)
                time.sleep(max(0.0, ahead))


def _blocks(file: ServedFile, start: int, stop: int) -> Iterator[bytes]:
    at, flip = start, file.faults.corrupt_at
    with file.path.open("rb") as source:
        source.seek(start)
        while at < stop:
            block = bytearray(source.read(min(BLOCK_BYTES, stop - at)))
            if (
                flip is not None
                and at <= flip < at + len(block)
                and file.faults.take("corruptions")
            ):
                block[flip - at] ^= 1
            at += len(block)
            yield bytes(block)
