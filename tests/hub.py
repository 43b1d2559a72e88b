"""A stand-in of the Hugging Face Hub on 127.0.0.1: repositories in memory, over its HTTP API."""

import contextlib
import hashlib
import http.server
import json
import re
import sys
import threading
import urllib.parse

import pytest

TOKEN = "hf_secret"
_LARGE_FILES = (".parquet", ".safetensors")  # in Git LFS, with a SHA-256


class Hub(http.server.ThreadingHTTPServer):
    """Repositories by kind and name.

    `requests` has all requests, as "METHOD PATH [RANGE]"; `cuts` the number of bytes after which
    the next downloads are cut off.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.requests = []
        self.cuts = []
        self._commits = {}  # by (kind, name, revision)
        self._contents = {}  # by (kind, name, commit)

    def push(
        self,
        name,
        files,
        card=None,
        *,
        kind="datasets",
        revision="main",
        private=False,
    ):
        """Make a commit, to which the revision then points; return it."""
        words = json.dumps([name, sorted(files), card, len(self._contents)])
        commit = hashlib.sha1(words.encode()).hexdigest()
        self._contents[kind, name, commit] = (dict(files), card, private)
        self._commits[kind, name, revision] = commit
        self._commits[kind, name, commit] = commit
        return commit

    def damage(self, name, commit, file, content):
        """Change the content of a file, but not the digest that the API states."""
        files, _, _ = self._contents["datasets", name, commit]
        files[file] = _Damaged(files[file], content)

    def find(self, kind, name, revision):
        """Return commit, files, card and privacy; None for an unknown revision."""
        commit = self._commits.get((kind, name, revision))
        if commit is None:
            return None
        return commit, *self._contents[kind, name, commit]

    def has_repository(self, kind, name):
        return any(key[:2] == (kind, name) for key in self._commits)

    def list_downloads(self):
        """Return the files that were downloaded, without repeated parts."""
        names = []
        for request in self.requests:
            match = re.match(r"GET .*/resolve/[0-9a-f]{40}/(\S+)", request)
            if match and match[1] not in names:
                names.append(match[1])
        return names


class _Damaged(bytes):
    """Content of a file in the API, and other bytes that a download sends."""

    def __new__(cls, stated, sent):
        damaged = super().__new__(cls, stated)
        damaged.sent = sent
        return damaged


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        """Print nothing."""

    def do_HEAD(self):
        self._answer(sends_content=False)

    def do_GET(self):
        self._answer(sends_content=True)

    def _answer(self, *, sends_content):
        path = urllib.parse.unquote(self.path.partition("?")[0])
        requested = f"{self.command} {path} {self.headers.get('Range', '')}".strip()
        self.server.requests.append(requested)
        api = re.fullmatch(r"/api/(\w+)/([\w.-]+/[\w.-]+)(?:/(revision|tree)/(.+))?", path)
        if api:
            self._answer_api(*api.groups())
            return
        file = re.fullmatch(r"/(?:(datasets)/)?([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path)
        if file:
            kind, name, revision, file_name = file.groups()
            self._answer_file(
                kind or "models",
                name,
                revision,
                file_name,
                sends_content,
            )
            return
        self._reply(404, {})

    def _find(self, kind, name, revision):
        """Return a repository at a commit, or reply with the error of the Hub."""
        found = self.server.find(kind, name, revision)
        if found is None:
            code = "RepoNotFound"
            if self.server.has_repository(kind, name):
                code = "RevisionNotFound"
            self._reply(404, {"X-Error-Code": code})
            return None
        if found[3] and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._reply(401, {"X-Error-Code": "RepoNotFound"})
            return None
        return found

    def _answer_api(self, kind, name, action, revision):
        found = self._find(kind, name, revision or "main")
        if found is None:
            return
        commit, files, card, _ = found
        if action == "tree":
            entries = []
            for file, content in files.items():
                entry = {
                    "type": "file",
                    "path": file,
                    "size": len(content),
                    "oid": "0" * 40,
                }
                entries.append(entry | _describe_large(file, content, "oid"))
            self._reply(200, {}, json.dumps(entries).encode())
            return
        siblings = []
        for file, content in files.items():
            sibling = {
                "rfilename": file,
                "size": len(content),
                "blobId": "0" * 40,
            }
            siblings.append(sibling | _describe_large(file, content, "sha256"))
        info = {
            "id": name,
            "sha": commit,
            "siblings": siblings,
            "cardData": card,
        }
        self._reply(200, {}, json.dumps(info).encode())

    def _answer_file(self, kind, name, revision, file, sends_content):
        found = self._find(kind, name, revision)
        if found is None:
            return
        commit, files, _, _ = found
        if file not in files:
            self._reply(404, {"X-Error-Code": "EntryNotFound"})
            return
        stated = files[file]
        headers = {
            "ETag": f'"{hashlib.sha256(stated).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        content = getattr(stated, "sent", stated)
        status = 200
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if start:
            status = 206
            first = int(start[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            content = content[first:]
        self._reply(status, headers, content, sends_content=sends_content)

    def _reply(self, status, headers, content=b"", *, sends_content=True):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        is_file = "X-Repo-Commit" in headers
        if sends_content and is_file and self.server.cuts:
            content = content[: self.server.cuts.pop(0)]
            self.close_connection = True
        if sends_content:
            with contextlib.suppress(BrokenPipeError):
                self.wfile.write(content)


def _describe_large(file, content, key):
    """Return the entry of Git LFS for a large file."""
    if not file.endswith(_LARGE_FILES):
        return {}
    facts = {
        "size": len(content),
        "pointerSize": 130,
        key: hashlib.sha256(content).hexdigest(),
    }
    return {"lfs": facts}


@contextlib.contextmanager
def serve():
    """Open a Hub, which ends with the context."""
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub that huggingface_hub asks, with an empty cache; skip the test without the library."""
    pytest.importorskip("huggingface_hub")
    forget_library(monkeypatch)  # it reads its environment when it is imported
    with serve() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        yield server


def forget_library(monkeypatch):
    """Let the next import of huggingface_hub read the environment again."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "huggingface_hub":
            monkeypatch.delitem(sys.modules, name)
