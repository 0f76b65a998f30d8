"""A stand-in of the Hugging Face hub on a loopback socket: data sets and models of several commits, and what
was asked.

It speaks what huggingface_hub and datasets really ask when a dataset is streamed or a model downloaded:

    GET  /api/datasets/<id>[/revision/<revision>]       commit and file list, with sizes
    GET  /api/datasets/<id>/tree/<revision>/<folder>    files with sizes
    HEAD /datasets/<id>/resolve/<revision>/<path>       size, ETag and commit of a file
    GET  the same                                       its bytes, or the range that is asked

For models the same under /api/models, and without a prefix for files. What uploads ask is in hub_upload.py.

The client reads HF_ENDPOINT when it is imported: it wants a process of its own, with `Hub.environment`.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

_ROUTE = re.compile(
    r"/(?:api/(?:datasets|models)/|datasets/|)(?P<id>[^/]+/[^/]+)"
    r"(?:/(?P<what>revision|tree|resolve)/(?P<revision>[^/]+)(?:/(?P<path>.*))?)?"
)
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")

Files = dict[str, bytes]
Kind = TypeVar("Kind", bound="Hub")


class Hub:
    """What the stand-in holds. `main` of a dataset or a model is the commit that was pushed last."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.asked: list[str] = []
        self.cut: set[str] = set()
        """Files of which half is sent, once, before the connection breaks."""
        self.before_file: Callable[[str], None] = lambda _: None
        """Called before the bytes of a file are sent; it may wait."""
        self.is_down = False
        """Every request is answered with 503."""
        self._commits: dict[str, dict[str, Files]] = {}

    def push(self, dataset: str, files: Files) -> str:
        """Add a commit with these files and move `main` to it; its id."""
        commits = self._commits.setdefault(dataset, {})
        commit = hashlib.sha1(f"{dataset} {len(commits)}".encode()).hexdigest()
        commits[commit] = files
        return commit

    def find(self, dataset: str, revision: str) -> tuple[str, Files] | None:
        """Commit and files at a revision."""
        commits = self._commits.get(dataset, {})
        commit = list(commits)[-1] if commits and revision == "main" else revision
        return (commit, commits[commit]) if commit in commits else None

    def environment(self, home: Path) -> dict[str, str]:
        """The whole environment of a process whose hub is this one: without anybody's tokens and proxies."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGING")) and not name.lower().endswith("_proxy")
        }
        own = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {**kept, **own, "NO_PROXY": "127.0.0.1"}


def serve_hub() -> AbstractContextManager[Hub]:
    """A hub without datasets on a free port."""
    return serve(Hub, Handler)


@contextmanager
def serve(kind: Callable[[str], Kind], handler: type["Handler"]) -> Iterator[Kind]:
    """A hub of some kind, made with its endpoint, behind a handler of its requests."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.hub = hub = kind(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers what downloads ask."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        url = urlsplit(self.path)
        path = unquote(url.path)
        if self.note():
            return self._send(503, b"", {})
        route = _ROUTE.fullmatch(path)
        if route is None:
            return self._refuse("EntryNotFound", "no such page")
        found = hub.find(route["id"], route["revision"] or "main")
        if found is None:
            known = hub.find(route["id"], "main") is not None
            return self._refuse("RevisionNotFound" if known else "RepoNotFound", f"no {path}")
        commit, files = found
        if route["what"] == "resolve":
            return self._file(commit, files, route["path"])
        if route["what"] in ("revision", None):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            return self._json({"id": route["id"], "sha": commit, "siblings": siblings, "tags": []}, commit)
        folder = f"{route['path'].strip('/')}/" if route["path"] else ""
        recursive = parse_qs(url.query).get("recursive", ["false"])[0].lower() == "true"
        if entries := _tree(files, folder, recursive=recursive):
            return self._json(entries, commit)
        return self._refuse("EntryNotFound", f"no folder {folder}")

    def note(self) -> bool:
        """Write the request down; whether the hub is down."""
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        hub.asked.append(f"{self.command} {unquote(urlsplit(self.path).path)}")
        return hub.is_down

    def _file(self, commit: str, files: Files, name: str) -> None:
        if name not in files:
            return self._refuse("EntryNotFound", f"no file {name}")
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        content, status, headers = files[name], 200, {}
        if asked := _RANGE.fullmatch(self.headers.get("Range", "")):
            start, end = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content, status = content[start : end + 1], 206
        headers |= {"ETag": f'"{_oid(files[name])}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if self.command == "GET":
            hub.before_file(name)
            if name in hub.cut:
                hub.cut.remove(name)
                return self._break_off(content, headers)
        self._send(status, content, headers)

    def _break_off(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.close_connection = True

    def _json(self, value: Any, commit: str) -> None:
        headers = {"Content-Type": "application/json", "X-Repo-Commit": commit}
        self._send(200, json.dumps(value).encode(), headers)

    def _refuse(self, code: str, message: str) -> None:
        self._send(404, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _tree(files: Files, folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    """Entries below a folder: all of them, or those directly in it."""
    entries: dict[str, dict[str, Any]] = {}
    for name, content in files.items():
        if not name.startswith(folder):
            continue
        parts = name.removeprefix(folder).split("/")
        for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
            path = folder + "/".join(parts[:depth])
            entries[path] = {"type": "directory", "path": path, "oid": _oid(path.encode()), "size": 0}
        if recursive or len(parts) == 1:
            entries[name] = {"type": "file", "path": name, "oid": _oid(content), "size": len(content)}
            if is_large(name):
                sha256 = hashlib.sha256(content).hexdigest()
                entries[name]["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return list(entries.values())


def is_large(name: str) -> bool:
    """Whether the hub keeps a file outside of git, known by its SHA-256."""
    return name.endswith(".safetensors")


def _oid(content: bytes) -> str:
    """As git names it."""
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()
