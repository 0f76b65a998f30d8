"""Versions of a release on a stand-in of the Hub: what is sent, what a kill costs, what is refused."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub_upload import READER, WRITER, Lost, UploadHub, serve_upload_hub
from tests.release.finished import FILES, NAME, finished

# huggingface_hub reads its settings when it is imported: a process of its own has the stand-in for a hub.
_PUBLISHER = """
import json, logging, os, sys, traceback
from pathlib import Path
from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.release.publishing import plan_of_publishing, publish
from tests.release.finished import lineage_below
logging.basicConfig(level=logging.INFO)
for line in sys.stdin:
    root, release, token, dry_run = json.loads(line)
    os.environ["HF_TOKEN"] = token
    try:
        lineage = lineage_below(Path(root), **release)
        print(json.dumps({"found": (plan_of_publishing if dry_run else publish)(lineage)}), flush=True)
    except Exception as error:
        said = {"error": type(error).__name__, "message": str(error), "shown": traceback.format_exc()}
        print(json.dumps({**said, "retryable": getattr(error, "retryable", None)}), flush=True)
"""
_ROOT = Path(__file__).parents[2]


class Publisher:
    """A process that publishes what `finished` made, to repositories of this hub."""

    def __init__(self, hub: UploadHub, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.log = home / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PUBLISHER],
                env={**hub.environment(home), "PYTHONPATH": str(_ROOT)},
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __call__(
        self, root: Path, hub_id: str, *, token: str = WRITER, dry_run: bool = False, **release: Any
    ) -> dict[str, Any]:
        """The outcome; empty where the process was killed meanwhile."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        settings = {**release, "publish": {"hub_id": hub_id}}
        self.process.stdin.write(json.dumps([str(root), settings, token, dry_run]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        found: dict[str, Any] = json.loads(answer) if answer else {}
        return found

    def kill(self, *_: str) -> None:
        """As kill -9 does it."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def hub() -> Iterator[UploadHub]:
    with serve_upload_hub() as served:
        yield served


@pytest.fixture(scope="module")
def publish(hub: UploadHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publisher]:
    with Publisher(hub, tmp_path_factory.mktemp("publisher")) as publisher:
        yield publisher


@pytest.fixture(autouse=True)
def _no_fault_is_left(hub: UploadHub) -> Iterator[None]:
    yield
    hub.before, hub.is_down, hub.ignored = (lambda _: None), False, set()


def once(what: str, do: Callable[[str], object]) -> Callable[[str], None]:
    """Do something before the first request of a kind is answered."""
    done: list[str] = []

    def before(request: str) -> None:
        if request.startswith(what) and not done:
            done.append(request)
            do(request)

    return before


def until(is_so: Callable[[], bool]) -> None:
    """Wait for what is about to happen in another thread."""
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def asked_since(hub: UploadHub, start: int, *kinds: str) -> list[str]:
    return [one for one in hub.asked[start:] if one.split()[0] in kinds]


def test_a_version_is_one_commit_and_a_tag_on_exactly_its_files(
    hub: UploadHub, publish: Publisher, tmp_path: Path
) -> None:
    finished(tmp_path)
    found = publish(tmp_path, "me/first")["found"]
    assert found["version"] == "v1"
    assert found["hub"] == f"{hub.endpoint}/me/first/tree/v1"
    files = hub.files("me/first", "v1")
    assert {name: files[name] for name in FILES} == FILES
    assert files.keys() - FILES.keys() == {"SHA256SUMS", ".gitattributes"}
    assert hub.commits("me/first") == 2  # the repository's own, and this
    assert "me/first" in hub.private
    start = len(hub.asked)
    assert publish(tmp_path, "me/first")["found"] == found
    assert asked_since(hub, start, "POST", "PUT") == []


def test_a_new_version_takes_away_what_the_one_before_had_and_nothing_else(
    hub: UploadHub, publish: Publisher, tmp_path: Path
) -> None:
    finished(tmp_path)
    publish(tmp_path, "me/second")
    hub.push("me/second", {**hub.files("me/second"), "picture.png": b"p", "LICENSE": b"l"})
    without = {name: value for name, value in FILES.items() if not name.startswith("eagle3/")}
    finished(tmp_path, {**without, "model.safetensors": b"W" * 5000}, license="mit")
    plan = publish(tmp_path, "me/second", dry_run=True, license="mit")["found"]
    assert [line.split()[:2] for line in plan[2:]] == [
        ["send", "SHA256SUMS"],
        ["send", "model.safetensors"],
        ["delete", "eagle3/config.json"],
        ["delete", "eagle3/model.safetensors"],
    ]
    assert publish(tmp_path, "me/second", license="mit")["found"]["version"] == "v2"
    files = hub.files("me/second")
    assert files == hub.files("me/second", "v2")
    assert files.keys() == without.keys() | {"SHA256SUMS", ".gitattributes", "picture.png", "LICENSE"}
    assert hub.files("me/second", "v1")["model.safetensors"] == FILES["model.safetensors"]


def test_a_dry_run_lists_every_file_and_sends_nothing(
    hub: UploadHub, publish: Publisher, tmp_path: Path
) -> None:
    finished(tmp_path)
    start = len(hub.asked)
    local, there, *files = publish(tmp_path, "me/dry", dry_run=True)["found"]
    assert local.endswith("v1: a new version")
    assert there == "me/dry v1: a new private repository, 7 files to send, 0.0 MB"
    assert "  send    model.safetensors  5,000 bytes" in files
    assert len(files) == 7
    assert asked_since(hub, start, "POST", "PUT") == []
    publish(tmp_path, "me/dry")
    assert publish(tmp_path, "me/dry", dry_run=True)["found"][1] == "me/dry v1: is there"


def test_a_large_file_that_came_before_a_kill_is_not_sent_again(
    hub: UploadHub, publish: Publisher, tmp_path: Path
) -> None:
    finished(tmp_path, {**FILES, "model.safetensors": b"k" * 5000, "eagle3/model.safetensors": b"K" * 3000})
    uploads: list[str] = []
    with Publisher(hub, tmp_path / "killed") as killed:

        def kill_at_the_second(request: str) -> None:
            this = request.removeprefix("upload ")
            uploads.append(this)
            if this != uploads[0]:
                until(lambda: uploads[0] in hub.stored)
                killed.kill()
                raise Lost

        hub.before = kill_at_the_second
        assert killed(tmp_path, "me/killed") == {}
    assert hub.commits("me/killed") == 1
    hub.before, start = (lambda _: None), len(hub.asked)
    assert publish(tmp_path, "me/killed")["found"]["version"] == "v1"
    assert asked_since(hub, start, "PUT") == [f"PUT /lfs/{uploads[1]}"]
    assert hub.files("me/killed", "v1")["eagle3/model.safetensors"] == b"K" * 3000


@pytest.mark.parametrize("last", ["commit", "tag"])
def test_a_kill_before_the_answer_to_commit_or_tag_costs_neither_another_commit_nor_the_tag(
    hub: UploadHub, publish: Publisher, tmp_path: Path, last: str
) -> None:
    finished(tmp_path)
    hub_id = f"me/killed-at-{last}"
    with Publisher(hub, tmp_path / "killed") as killed:
        hub.before = once(last, killed.kill)
        assert killed(tmp_path, hub_id) == {}
    until(lambda: hub.commits(hub_id) == 2 and (last == "commit" or hub.tags.get(hub_id)))
    assert publish(tmp_path, hub_id)["found"]["version"] == "v1"
    assert hub.commits(hub_id) == 2
    assert hub.files(hub_id, "v1")["config.json"] == FILES["config.json"]


def test_a_connection_that_breaks_is_taken_up_again(
    hub: UploadHub, publish: Publisher, tmp_path: Path
) -> None:
    finished(tmp_path, {**FILES, "model.safetensors": b"c" * 5000, "eagle3/model.safetensors": b"C" * 3000})
    uploads: list[str] = []

    def lose_the_first(request: str) -> None:
        uploads.append(request)
        if len(uploads) == 1:
            raise Lost

    hub.before = lose_the_first
    assert publish(tmp_path, "me/shaky")["found"]["version"] == "v1"
    assert uploads.count(uploads[0]) == 2
    assert hub.files("me/shaky", "v1")["model.safetensors"] == b"c" * 5000


@pytest.mark.parametrize("token", ["hf_of-nobody", READER, "", "hf_gehe\nimnis", "hf_\u00e4"])
def test_a_token_that_does_not_do_is_refused_and_shown_nowhere(
    hub: UploadHub, publish: Publisher, tmp_path: Path, token: str
) -> None:
    finished(tmp_path)
    refused = publish(tmp_path, "me/refused", token=token)
    assert refused["error"] == "BadInput"
    assert "HF_TOKEN" in refused["message"]
    assert not refused["retryable"]
    assert hub.find("me/refused", "main") is None
    if token:
        shown = json.dumps(refused, ensure_ascii=False) + publish.log.read_text(errors="replace")
        assert not [part for part in token.split() if part in shown]


def test_the_writers_token_is_shown_nowhere_either(
    hub: UploadHub, publish: Publisher, tmp_path: Path
) -> None:
    finished(tmp_path)
    hub.is_down = True
    down = publish(tmp_path, "me/quiet")
    hub.is_down = False
    found = publish(tmp_path, "me/quiet")
    assert found["found"]["version"] == "v1"
    written = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    for text in (json.dumps([down, found]), publish.log.read_text(), *written):
        assert WRITER not in text


def test_a_hub_that_is_down_may_be_back(hub: UploadHub, publish: Publisher, tmp_path: Path) -> None:
    finished(tmp_path)
    hub.is_down = True
    failed = publish(tmp_path, "me/down")
    assert (failed["error"], failed["retryable"]) == ("SourceUnreachable", True)
    hub.is_down = False
    assert publish(tmp_path, "me/down")["found"]["version"] == "v1"


def test_a_tag_of_other_content_is_never_moved_and_the_message_is_the_way_out(
    hub: UploadHub, publish: Publisher, tmp_path: Path
) -> None:
    finished(tmp_path / "one")
    publish(tmp_path / "one", "me/taken")
    finished(tmp_path / "other", {**FILES, "config.json": b"[]"})
    for dry_run in (False, True):
        refused = publish(tmp_path / "other", "me/taken", dry_run=dry_run)
        assert refused["error"] == "BadInput"
        assert "the tag v1 of me/taken is another release" in refused["message"]
    assert hub.files("me/taken", "v1")["config.json"] == FILES["config.json"]
    message = refused["message"]
    subprocess.run(shlex.split(message[message.index("mv ") :]), check=True)
    assert publish(tmp_path / "other", "me/taken")["found"]["version"] == "v2"
    assert hub.files("me/taken")["config.json"] == b"[]"


def test_an_older_version_is_not_put_before_a_newer_one(
    hub: UploadHub, publish: Publisher, tmp_path: Path
) -> None:
    finished(tmp_path)
    commit = hub.create("me/newer")
    hub.tags["me/newer"] = {"v3": commit, "stable": commit}
    refused = publish(tmp_path, "me/newer")
    assert refused["error"] == "BadInput"
    assert "me/newer has v3 already" in refused["message"]
    assert refused["message"].endswith(f"{NAME}/v4")


@pytest.mark.parametrize("at", ["commit", "tag"])
def test_somebody_elses_change_in_between_is_a_conflict_and_looked_at_anew(
    hub: UploadHub, publish: Publisher, tmp_path: Path, at: str
) -> None:
    finished(tmp_path)
    hub_id = f"me/conflict-{at}"

    def change(_: str) -> None:
        commit = hub.push(hub_id, {**hub.files(hub_id), "notes.txt": b"n"})
        if at == "tag":
            hub.tags[hub_id] = {"v1": commit}

    hub.before = once(at, change)
    failed = publish(tmp_path, hub_id)
    assert (failed["error"], failed["retryable"]) == ("Busy", True)
    again = publish(tmp_path, hub_id)
    if at == "tag":  # theirs has the same release
        assert again["found"]["version"] == "v1"
    else:  # what they put there is no release
        assert "holds notes.txt, and no release" in again["message"]


def test_a_repository_of_something_else_is_left_alone(
    hub: UploadHub, publish: Publisher, tmp_path: Path
) -> None:
    finished(tmp_path)
    names = ("config.json", "model.safetensors", "tokenizer.json", "vocab.json", "README.md")
    hub.create("me/a-target", dict.fromkeys(names, b"t"))
    for dry_run in (True, False):
        refused = publish(tmp_path, "me/a-target", dry_run=dry_run)
        assert refused["error"] == "BadInput"
        assert "holds config.json, model.safetensors, tokenizer.json and 1 more" in refused["message"]
    assert hub.commits("me/a-target") == 1


def test_a_version_that_the_hub_took_only_in_part_gets_no_tag(
    hub: UploadHub, publish: Publisher, tmp_path: Path
) -> None:
    finished(tmp_path)
    hub.ignored = {"eagle3/model.safetensors"}
    refused = publish(tmp_path, "me/ignoring")
    assert refused["error"] == "BadInput"
    assert "did not take eagle3/model.safetensors" in refused["message"]
    assert "v1" not in hub.tags.get("me/ignoring", {})
