"""Downloads from a stand-in of the hub: what is asked for, at which commit, and by a second start."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import NotEnoughRoom
from eagle3_pipeline.hub import download
from tests.hub import Hub, serve_hub

# huggingface_hub reads its settings when it is imported: a process of its own has the stand-in for a hub.
_DOWNLOADER = """
import json, sys
from pathlib import Path
from eagle3_pipeline.hub import download
for line in sys.stdin:
    try:
        folder = download(*json.loads(line))
        files = sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())
        print(json.dumps({"commit": folder.name, "files": files, "folder": str(folder)}), flush=True)
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
"""
_BESIDE = ("*.json", "*.jinja")
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


def _start(hub: Hub, home: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _DOWNLOADER],
        env={**hub.environment(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _send(process: "subprocess.Popen[str]", hub_id: str, revision: str) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps([hub_id, revision, _BESIDE]) + "\n")
    process.stdin.flush()


def _answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    value: dict[str, Any] = json.loads(process.stdout.readline())
    return value


@pytest.fixture(scope="module")
def ask(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    process = _start(hub, tmp_path_factory.mktemp("cache"))

    def one(hub_id: str, revision: str = "main") -> dict[str, Any]:
        _send(process, hub_id, revision)
        return _answer(process)

    yield one
    process.communicate(timeout=30)


def _model(**more: bytes) -> dict[str, bytes]:
    return {"config.json": b'{"a": 1}', "model.safetensors": b"w" * 5000, **more}


def _fetched(hub: Hub, hub_id: str) -> list[str]:
    """Files of the model whose bytes were sent."""
    sent = [one for one in hub.asked if one.startswith(f"GET /{hub_id}/resolve/")]
    return sorted(one.split("/", 6)[-1] for one in sent)


def test_only_what_is_needed_is_fetched_and_never_a_pickle(hub: Hub, ask: Ask) -> None:
    files = _model(**{
        "pytorch_model.bin": b"p", "training_state.pt": b"p", "original/consolidated.safetensors": b"w",
        "consolidated.safetensors": b"w", "README.md": b"r", "chat_template.jinja": b"t",
    })  # fmt: skip
    commit = hub.push("some/model", files)
    found = ask("some/model")
    assert found["commit"] == commit
    assert found["files"] == ["chat_template.jinja", "config.json", "model.safetensors"]
    assert _fetched(hub, "some/model") == found["files"]


def test_the_index_says_which_weights_are_fetched(hub: Hub, ask: Ask) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = dict.fromkeys(("model-1.safetensors", "model-2.safetensors", "extra.safetensors"), b"w")
    files |= {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    hub.push("some/large", files)
    assert ask("some/large")["files"] == [
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
    ]
    del files["model-2.safetensors"]
    hub.push("some/large", files)
    refused = ask("some/large")
    assert refused["error"] == "BadInput"
    assert "lacks model-2.safetensors, which its own model.safetensors.index.json names" in refused["message"]


def test_a_branch_that_moves_while_it_is_fetched_gives_one_commit(hub: Hub, ask: Ask) -> None:
    first = hub.push("some/moving", _model())

    def move(name: str) -> None:
        hub.before_file = lambda _: None
        hub.push("some/moving", _model(**{"model.safetensors": b"new"}))

    hub.before_file = move
    found = ask("some/moving")
    assert found["commit"] == first
    assert (Path(found["folder"]) / "model.safetensors").read_bytes() == b"w" * 5000
    assert ask("some/moving", first)["commit"] == first
    assert ask("some/moving")["commit"] != first


def test_a_connection_that_breaks_is_taken_up_again(hub: Hub, ask: Ask) -> None:
    hub.push("some/shaky", _model())
    hub.cut = {"model.safetensors"}
    found = ask("some/shaky")
    assert (Path(found["folder"]) / "model.safetensors").read_bytes() == b"w" * 5000
    assert not hub.cut


def test_what_is_not_there_is_refused_and_a_hub_that_is_down_may_be_back(hub: Hub, ask: Ask) -> None:
    hub.push("some/pickles", {"config.json": b"{}", "pytorch_model.bin": b"p"})
    refused = ask("some/pickles")
    assert refused["error"] == "BadInput"
    assert "has no *.safetensors, only pickles (pytorch_model.bin)" in refused["message"]
    assert _fetched(hub, "some/pickles") == []
    assert ask("some/nothing")["error"] == "BadInput"
    hub.push("some/late", _model())
    hub.push("some/known", _model())
    known = ask("some/known")
    hub.is_down = True
    try:
        assert ask("some/late")["error"] == "SourceUnreachable"
        assert ask("some/known") == known  # it is whole in the cache
    finally:
        hub.is_down = False


def test_of_several_weights_without_an_index_all_must_be_in_the_cache(hub: Hub, ask: Ask) -> None:
    hub.push("some/parts", {"config.json": b"{}", "a.safetensors": b"a", "b.safetensors": b"b"})
    whole = ask("some/parts")
    assert whole["files"] == ["a.safetensors", "b.safetensors", "config.json"]
    (Path(whole["folder"]) / "b.safetensors").unlink()  # as a hub leaves it that fails after the first
    hub.is_down = True
    try:
        assert ask("some/parts")["error"] == "SourceUnreachable"
    finally:
        hub.is_down = False
    assert ask("some/parts") == whole


def test_an_index_that_says_nothing_is_named(hub: Hub, ask: Ask) -> None:
    hub.push("some/odd", {"config.json": b"{}", "model.safetensors.index.json": b"[]"})
    refused = ask("some/odd")
    assert refused["error"] == "BadInput"
    assert "model.safetensors.index.json of some/odd" in refused["message"]
    assert "it has no weight_map" in refused["message"]


def test_a_killed_download_goes_on_with_what_is_not_whole(hub: Hub, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    hub.push("some/huge", {
        "config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": b"1" * 5000, "model-2.safetensors": b"2" * 5000,
    })  # fmt: skip
    stuck, go = threading.Event(), threading.Event()

    def before(name: str) -> None:
        if name == "model-2.safetensors":
            snapshots = tmp_path / "hub" / "models--some--huge" / "snapshots"
            while len(list(snapshots.glob("*/*"))) < 3:  # files come in any order: the others are whole
                go.wait(0.02)
            stuck.set()
            go.wait(30)

    hub.before_file = before
    process = _start(hub, tmp_path)
    _send(process, "some/huge", "main")
    assert stuck.wait(60)
    process.kill()
    process.communicate()
    hub.before_file = lambda _: None
    go.set()
    again = len(hub.asked)
    process = _start(hub, tmp_path)
    _send(process, "some/huge", "main")
    assert "model-2.safetensors" in _answer(process)["files"]
    process.communicate(timeout=30)
    asked = [one for one in hub.asked[again:] if one.startswith("GET /some/huge/resolve/")]
    assert [one.rsplit("/", 1)[-1] for one in asked] == ["model-2.safetensors"]


def test_a_download_must_fit_on_the_disk_of_the_cache_before_its_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.hf_api import ModelInfo

    def info(*_: Any, **__: Any) -> ModelInfo:
        files = [{"rfilename": "model.safetensors", "size": 1 << 60}, {"rfilename": "x.bin", "size": 1 << 61}]
        return ModelInfo(id="a/b", sha="c" * 40, siblings=files)

    def never(*_: Any, **__: Any) -> str:
        raise AssertionError("nothing is fetched")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    with pytest.raises(
        NotEnoughRoom, match=rf"downloading a/b needs 1073741824\.0 GiB .*{tmp_path}.*HF_HOME"
    ):
        download("a/b", "c" * 40, ("config.json",))
