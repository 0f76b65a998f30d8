"""A stand-in of the Hugging Face hub that takes uploads: hub.py with people, tags, and these requests.

    POST /api/repos/create                      a repository with a first commit
    GET  /api/models/<id>/refs                  commit of main, tags
    POST /api/validate-yaml                     the front matter of a model card
    POST /api/models/<id>/preupload/<revision>  which files are large, and which are ignored
    POST /<id>.git/info/lfs/objects/batch       where a large file goes; nowhere if it is there
    PUT  /lfs/<sha256>                          its bytes; POST .../verify afterwards
    POST /api/models/<id>/commit/<revision>     JSON lines: parent, small files, names of large ones, ...
    POST /api/models/<id>/tag/<revision>        409 where there is such a tag

Large files go as Git LFS has it: HF_HUB_DISABLE_XET keeps the client from its newer way.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.hub import Files, Handler, Hub, is_large, serve

WRITER, READER = "hf_of-a-writer", "hf_of-a-reader"
_ID = r"(?P<id>[^/]+/[^/]+)"


class Lost(Exception):
    """The connection breaks, and what it brought is not taken."""


class UploadHub(Hub):
    """Repositories to write to, for those who have the token of a writer."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.private: set[str] = set()
        self.tags: dict[str, dict[str, str]] = {}
        self.stored: dict[str, bytes] = {}
        """Large files by SHA-256, whether a commit has them or not."""
        self.ignored: set[str] = set()
        """Files that a .gitignore in the repository names."""
        self.before: Callable[[str], object] = lambda _: None
        """Called with `upload <sha256>` (half of it has come), `commit` and `tag` before each is done.

        It may raise Lost."""

    def create(self, hub_id: str, files: Files | None = None) -> str:
        """A new repository; its first commit."""
        return self.push(hub_id, {".gitattributes": b"*.safetensors filter=lfs", **(files or {})})

    def files(self, hub_id: str, revision: str = "main") -> Files:
        """What a revision has."""
        found = self.find(hub_id, revision)
        assert found is not None
        return found[1]

    def commits(self, hub_id: str) -> int:
        """How many commits there are."""
        return len(self._commits[hub_id])

    def find(self, dataset: str, revision: str) -> tuple[str, Files] | None:
        return super().find(dataset, self.tags.get(dataset, {}).get(revision, revision))

    def environment(self, home: Path) -> dict[str, str]:
        return {**super().environment(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def serve_upload_hub() -> AbstractContextManager[UploadHub]:
    """Such a hub, empty, on a free port."""
    return serve(UploadHub, _UploadHandler)


class _UploadHandler(Handler):
    @property
    def hub(self) -> UploadHub:
        found: UploadHub = self.server.hub  # type: ignore[attr-defined]
        return found

    def do_GET(self) -> None:  # noqa: N802 - http.server calls it so
        refs = re.fullmatch(rf"/api/models/{_ID}/refs", self._path)
        if refs is None:
            return super().do_GET()
        if self.note():
            return self._send(503, b"", {})
        if self._is_allowed(write=False):
            self._refs(refs["id"])

    def do_PUT(self) -> None:  # noqa: N802
        self.note()
        sha256, length = self._path.removeprefix("/lfs/"), int(self.headers["Content-Length"])
        content = self.rfile.read(length // 2)
        try:
            self.hub.before(f"upload {sha256}")
        except Lost:
            self.close_connection = True
            return
        content += self.rfile.read(length - len(content))
        if hashlib.sha256(content).hexdigest() == sha256:
            self.hub.stored[sha256] = content
            self._say({})

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.note():
            return self._send(503, b"", {})
        if not self._is_allowed(write=True):
            return
        for pattern, answer in _POSTS.items():
            if match := re.fullmatch(pattern, self._path):
                return answer(self, body, match.groupdict().get("id", ""))
        self._complain(404, f"no {self._path}")

    @property
    def _path(self) -> str:
        return unquote(urlsplit(self.path).path)

    def _is_allowed(self, *, write: bool) -> bool:
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in (WRITER, READER):
            self._complain(401, "Invalid credentials in Authorization header")
        elif write and token != WRITER:
            self._complain(403, "Forbidden: you must use a write token to upload to a repository.")
        else:
            return True
        return False

    def _refs(self, hub_id: str) -> None:
        found = self.hub.find(hub_id, "main")
        if found is None:
            return self._refuse("RepoNotFound", "Repository not found")
        tags = self.hub.tags.get(hub_id, {})
        self._say({
            "branches": [{"name": "main", "ref": "refs/heads/main", "targetCommit": found[0]}],
            "converts": [],
            "tags": [
                {"name": name, "ref": f"refs/tags/{name}", "targetCommit": commit}
                for name, commit in tags.items()
            ],
        })  # fmt: skip

    def _create(self, body: bytes, _: str) -> None:
        asked = json.loads(body)
        hub_id = f"{asked['organization']}/{asked['name']}"
        if self.hub.find(hub_id, "main") is not None:
            return self._complain(409, "You already created this model repo")
        self.hub.create(hub_id)
        if asked.get("visibility") == "private":
            self.hub.private.add(hub_id)
        self._say({"url": f"{self.hub.endpoint}/{hub_id}"})

    def _validate(self, body: bytes, _: str) -> None:
        self._say({"errors": [], "warnings": []})

    def _preupload(self, body: bytes, hub_id: str) -> None:
        self._say({
            "files": [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if is_large(one["path"]) else "regular",
                    "shouldIgnore": one["path"] in self.hub.ignored,
                }
                for one in json.loads(body)["files"]
            ]
        })  # fmt: skip

    def _batch(self, body: bytes, _: str) -> None:
        objects = []
        for one in json.loads(body)["objects"]:
            href = f"{self.hub.endpoint}/lfs/{one['oid']}"
            actions = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            is_there = one["oid"] in self.hub.stored
            objects.append(one if is_there else {**one, "actions": actions})
        self._say({"transfer": "basic", "objects": objects})

    def _verify(self, body: bytes, _: str) -> None:
        self._say({})

    def _commit(self, body: bytes, hub_id: str) -> None:
        self.hub.before("commit")
        head, current = self.hub.find(hub_id, "main") or ("", {})
        files, (header, *operations) = dict(current), map(json.loads, body.splitlines())
        if header["value"].get("parentCommit", head) != head:
            return self._complain(412, "A commit has happened since. Please refresh and try again.")
        for one in operations:
            value = one["value"]
            if one["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif one["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
            else:
                del files[value["path"]]
        commit = self.hub.push(hub_id, files)
        url = f"{self.hub.endpoint}/{hub_id}/commit/{commit}"
        self._say({"success": True, "commitOid": commit, "commitUrl": url})

    def _tag(self, body: bytes, hub_id: str) -> None:
        self.hub.before("tag")
        tags, name = self.hub.tags.setdefault(hub_id, {}), json.loads(body)["tag"]
        if name in tags:
            return self._complain(409, "Tag reference exists already")
        tags[name] = self._path.rpartition("/")[2]
        self._say({})

    def _say(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _complain(self, status: int, message: str) -> None:
        headers = {"Content-Type": "application/json", "X-Error-Message": message}
        self._send(status, json.dumps({"error": message}).encode(), headers)


_POSTS: dict[str, Callable[[_UploadHandler, bytes, str], None]] = {
    r"/api/repos/create": _UploadHandler._create,
    r"/api/validate-yaml": _UploadHandler._validate,
    rf"/api/models/{_ID}/preupload/[^/]+": _UploadHandler._preupload,
    rf"/{_ID}\.git/info/lfs/objects/batch": _UploadHandler._batch,
    r"/lfs/[^/]+/verify": _UploadHandler._verify,
    rf"/api/models/{_ID}/commit/[^/]+": _UploadHandler._commit,
    rf"/api/models/{_ID}/tag/[^/]+": _UploadHandler._tag,
}
