"""Hugging Face datasets: real clients against a stand-in of the hub, in a process of their own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import BadInput, SourceUnreachable
from eagle3_pipeline.prompts.hub_dataset import name_of, resolve_revision
from eagle3_pipeline.recipe.prompts import PromptSource

Seen = dict[str, Any]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Seen:
    """What tests/prompts/streaming.py reports."""
    argv = [sys.executable, "-W", "error", "-m", "tests.prompts.streaming"]
    argv += [str(tmp_path_factory.mktemp("streaming")), str(tiny_llama)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: Seen = json.loads(done.stdout)
    return found


def _questions(rows: list[Any]) -> list[str]:
    return [row["question"] for _, row in rows]


def test_commit_and_seed_fix_the_order_of_a_dataset_of_several_files(seen: Seen) -> None:
    first, again, other = (_questions(rows) for rows in seen["seeds"])
    assert first == again
    assert sorted(first) == sorted(other) != first != other
    assert {text.split(":")[0] for text in first[:10]} == {"main/train-0", "main/train-1"}


def test_the_order_of_a_dataset_is_the_same_in_every_version(seen: Seen) -> None:
    """Another order would make every shard of samples anew."""
    for rows, order in [
        (seen["seeds"][0], "0:16 0:27 0:20 0:8 1:12 1:4"),
        (seen["seeds"][2], "1:28 0:25 1:14"),
    ]:
        wanted = [f"main/train-{place} of" for place in order.split()]
        assert [" ".join(text.split()[:2]) for text in _questions(rows)[: len(wanted)]] == wanted


def test_rows_come_from_the_subset_and_the_split_of_the_recipe(seen: Seen) -> None:
    sizes = {"main train": 60, "main test": 6, "socratic train": 12, "socratic test": 5}
    assert {name: len(rows) for name, rows in seen["splits"].items()} == sizes
    for name, rows in seen["splits"].items():
        assert all(text.startswith(name.replace(" ", "/")) for text in _questions(rows))
    assert seen["splits"]["socratic test"][0][0] == "some/maths/socratic:1"


def test_of_a_named_column_only_what_a_prompt_needs_is_streamed(seen: Seen) -> None:
    assert [sorted(row) for _, row in seen["column"]] == [["question", "system"]] * 6


def test_content_of_several_types_in_one_file_stays_what_it_is(seen: Seen) -> None:
    """The datasets library keeps such a column as JSON text, and could give it out as such."""
    contents = [row["messages"][0]["content"] for _, row in seen["chats"]]
    assert [{"type": "text", "text": "Question 1?"}] in contents
    assert {"Question 0?", "Question 2?", "Look!", "How late?"} <= {str(one) for one in contents}


def test_images_are_looked_for_and_neither_decoded_nor_kept(seen: Seen) -> None:
    rows = {row["prompt"]: row for _, row in seen["pictures"]}
    assert {prompt: row["image"] for prompt, row in rows.items()} == {"Look!": True, "Hi": False}
    assert [part["image"] for part in rows["Look!"]["turns"]] == [
        {"bytes": b"no picture".hex(), "path": None}
    ]


def test_a_dataset_that_is_a_json_list_is_read(seen: Seen) -> None:
    rows = [row for _, row in seen["list"]]
    assert {"question": "Question 0?", "kind": "a"} in rows
    assert {"question": ["Question 1?", "And then?"], "kind": "a"} in rows


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "split",
            "some/maths, subset main, revision main, split dev cannot be read: ValueError: Bad split: dev. ",
        ),
        (
            "subset",
            "some/maths, subset hard, .* Available: ['main', 'socratic']. Check the names and HF_TOKEN",
        ),
        (
            "no subset",
            "some/maths, revision main, split train .* the available configs: ['main', 'socratic']",
        ),
        (
            "column",
            "some/maths/main has no column 'questions', there are: question, answer, system. Name one",
        ),
        ("column of a list", "some/list has no column 'questions', there are: question, kind, answer. Name"),
        (
            "other rows",
            "some/uneven, revision main, split train cannot be read: .* Some rows have other columns or",
        ),
    ],
)
def test_a_name_that_the_dataset_lacks_is_told_with_those_it_has(seen: Seen, what: str, message: str) -> None:
    said = " ".join(seen["refusals"][what].split())
    start, *rest = message.split(" .* ")
    assert said.startswith(f"BadInput: dataset {start}")
    assert all(part in said for part in rest)


def test_a_larger_count_takes_the_same_commit_although_main_moved_and_keeps_the_smaller_as_its_prefix(
    seen: Seen,
) -> None:
    small, large = seen["small"], seen["large"]
    commits = seen["commits"]
    pinned = {"some/maths@main": commits["first"], "some/chats@main": commits["chats"]}
    assert small["facts"]["revisions"] == large["facts"]["revisions"] == pinned
    assert large["prompts"][:8] == small["prompts"]
    assert not any("second" in turn for prompt in large["prompts"] for turn in prompt["turns"])
    assert seen["elsewhere"]["revisions"]["some/maths@main"] == commits["second"]


def test_weights_hold_and_tools_and_images_are_rejected_in_streams_too(seen: Seen) -> None:
    facts = seen["large"]["facts"]
    assert facts["rejected"] == {"multimodal": 1, "tool_call": 1}
    kept = {one["source"]: one["kept"] for one in facts["sources"]}
    assert kept == {"some/maths/main": 21, "some/chats": 3}  # all of the second, which had a weight of 1/4
    turns = {prompt["turns"][0] for prompt in seen["large"]["prompts"]}
    assert {f"Question {row}?" for row in range(3)} <= turns
    assert all(
        prompt["system"] == "Be brief." for prompt in seen["large"]["prompts"] if "asks" in prompt["turns"][0]
    )


def test_every_file_is_read_at_the_commit(seen: Seen) -> None:
    files = [request for request in seen["asked"] if "/resolve/" in request]
    assert files
    assert not any("/resolve/main/" in request for request in files)


def test_a_source_is_called_by_its_file_or_its_dataset_and_subset() -> None:
    assert name_of(PromptSource(path=Path("a/b.jsonl"))) == "b.jsonl"
    assert name_of(PromptSource(dataset="a/b")) == "a/b"
    assert name_of(PromptSource(dataset="a/b", subset="main")) == "a/b/main"


def _status(code: int) -> Exception:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    answer: Any = httpx.Response(code, request=httpx.Request("GET", "http://hub"))
    return HfHubHTTPError(f"status {code}", response=answer)


def _wrapped(error: Exception) -> Exception:
    """As datasets does it: one error in another, one raised while another was handled."""
    outer = FileNotFoundError("no file")
    outer.__context__ = RuntimeError("not read")
    outer.__context__.__cause__ = error
    return outer


def _transport() -> Exception:
    import httpx

    return httpx.ReadTimeout("too slow")


def _offline() -> Exception:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return OfflineModeIsEnabled("HF_HUB_OFFLINE=1 is set")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionError("no route"), SourceUnreachable),
        (TimeoutError("too slow"), SourceUnreachable),
        (_transport(), SourceUnreachable),
        *((_status(code), SourceUnreachable) for code in (408, 429, 500, 503)),
        *((_status(code), BadInput) for code in (401, 403, 404)),
        (_offline(), BadInput),
        (ValueError("Bad split"), BadInput),
    ],
    ids=str,
)
@pytest.mark.parametrize("wrap", [lambda error: error, _wrapped], ids=["bare", "wrapped"])
def test_only_a_failure_of_the_network_or_the_hub_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception], wrap: Any
) -> None:
    import huggingface_hub

    def fail(*_: Any, **__: Any) -> Any:
        raise wrap(error)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    way_out = {
        SourceUnreachable: "Another attempt may reach it; if none does, check the network and the proxy, or",
        BadInput: "Check the names and HF_TOKEN, or",
    }[expected]
    message = (
        rf"^dataset a/b, revision main, split train cannot be read: .*\. {way_out} download it and give its"
    )
    with pytest.raises(expected, match=message) as caught:
        resolve_revision(PromptSource(dataset="a/b"))
    assert getattr(caught.value, "retryable") is (expected is SourceUnreachable)  # noqa: B009
