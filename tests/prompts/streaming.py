"""A process that selects prompts from a stand-in hub and prints what came out as JSON.

    python -m tests.prompts.streaming <work folder> <model folder>

huggingface_hub reads its endpoint when it is imported, so the hub is there before anything else.
"""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.hub import Hub, serve_hub

MATHS = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*.parquet}
  - {split: test, path: main/test.parquet}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train.parquet}
  - {split: test, path: socratic/test.parquet}
---
"""


def push_maths(hub: Hub, mark: str) -> str:
    """A commit of a dataset of two subsets with two splits each; every question carries the mark."""
    files = {"README.md": MATHS.encode()}
    sizes = {"main/train-0": 30, "main/train-1": 30, "main/test": 6, "socratic/train": 12, "socratic/test": 5}
    for name, size in sizes.items():
        said = [f"{name}:{row} of {mark} asks how much {row * 7} and {row * row} are" for row in range(size)]
        rows = [{"question": text, "answer": "never sent", "system": "Be brief."} for text in said]
        files[f"{name}.parquet"] = _parquet(rows)
    return hub.push("some/maths", files)


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def push_lines(hub: Hub) -> str:
    """A commit of a dataset that is one JSONL file: content of several types, images and tools beside it."""
    contents = ["Question 0?", [{"type": "text", "text": "Question 1?"}], "Question 2?", "Look!", "How late?"]
    rows = [
        {"messages": [{"role": "user", "content": one}], "image": None, "tools": "[]"} for one in contents
    ]
    rows[3]["image"] = {"path": "a.png"}
    rows[4]["tools"] = '[{"name": "clock"}]'
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    return hub.push("some/chats", {"train.jsonl": lines.encode()})


def push_pictures(hub: Hub) -> str:
    """A commit of a dataset of images. They are none, so that whoever decodes one fails."""
    import datasets

    turns = datasets.List({"image": datasets.Image()})
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "image": datasets.Image(), "turns": turns}
    )
    picture = {"bytes": b"no picture", "path": None}
    rows = [
        {"prompt": "Look!", "image": picture, "turns": [{"image": picture}]},
        {"prompt": "Hi", "image": None, "turns": []},
    ]
    table = datasets.Dataset.from_list(rows, features=features)
    buffer = io.BytesIO()
    table.to_parquet(buffer)
    return hub.push("some/pictures", {"train.parquet": buffer.getvalue()})


def push_uneven(hub: Hub) -> str:
    """A commit of a dataset whose second file has a column that the first one lacks."""
    files = {"a.jsonl": b'{"question": "Why?"}\n', "b.jsonl": b'{"question": "How?", "answer": "So."}\n'}
    return hub.push("some/uneven", files)


def push_list(hub: Hub) -> str:
    """A commit of a dataset that is one list: its columns and types are not known before it is read."""
    questions = ["Question 0?", ["Question 1?", "And then?"]]
    rows = [{"question": one, "kind": "a", "answer": "never sent"} for one in questions]
    return hub.push("some/list", {"train.json": json.dumps(rows, indent=1).encode()})


def report(hub: Hub, folder: Path, model: Path) -> dict[str, Any]:
    """Everything that the tests look at."""
    import datasets

    from eagle3_pipeline.prompts.hub_dataset import stream_dataset
    from eagle3_pipeline.recipe.prompts import PromptSource
    from tests.prompts.world import make_lineage

    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0  # else 5 s at the end of each stream

    def stream(commit: str, seed: int, **source: Any) -> list[Any]:
        one = PromptSource(**{"dataset": "some/maths", "subset": "main", **source})
        return [[row.where, row.value] for row in stream_dataset(one, commit, seed)]

    def refusal(commit: str, **source: Any) -> str:
        try:
            stream(commit, 0, **source)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "none"

    first, chats = push_maths(hub, "first"), push_lines(hub)
    a_list, uneven = push_list(hub), push_uneven(hub)
    seen: dict[str, Any] = {
        "commits": {"first": first, "chats": chats},
        "seeds": [stream(first, seed) for seed in (0, 0, 1)],
        "splits": {
            f"{subset} {split}": stream(first, 0, subset=subset, split=split)
            for subset in ("main", "socratic")
            for split in ("train", "test")
        },
        "column": stream(first, 0, split="test", column="question"),
        "chats": stream(chats, 0, dataset="some/chats", subset=None),
        "list": stream(a_list, 0, dataset="some/list", subset=None, column="question"),
        "pictures": stream(push_pictures(hub), 0, dataset="some/pictures", subset=None),
        "refusals": {
            "split": refusal(first, split="dev"),
            "subset": refusal(first, subset="hard"),
            "no subset": refusal(first, subset=None),
            "column": refusal(first, column="questions"),
            "column of a list": refusal(a_list, dataset="some/list", subset=None, column="questions"),
            "other rows": refusal(uneven, dataset="some/uneven", subset=None),
        },
    }
    sources = [{"dataset": "some/maths", "subset": "main"}, {"dataset": "some/chats", "weight": 0.25}]
    from eagle3_pipeline.prompts.selection import make_prompts

    seen["small"] = _made(make_lineage(folder, model, count=8, sources=sources))
    seen["commits"]["second"] = push_maths(hub, "second")
    seen["large"] = _made(make_lineage(folder, model, count=24, sources=sources))
    seen["elsewhere"] = make_prompts(make_lineage(folder / "new", model, count=8, sources=sources)).facts
    seen["asked"] = hub.asked
    return seen


def _made(lineage: Any) -> dict[str, Any]:
    from eagle3_pipeline.prompts.selection import make_prompts

    manifest = make_prompts(lineage)
    lines = (lineage.prompts().folder / "prompts.jsonl").read_text().splitlines()
    return {"facts": manifest.facts, "prompts": [json.loads(line) for line in lines]}


if __name__ == "__main__":
    work = Path(sys.argv[1])
    with serve_hub() as stand_in:
        own = stand_in.environment(work / "hub")
        os.environ.clear()
        os.environ.update(own)
        print(json.dumps(report(stand_in, work, Path(sys.argv[2])), default=bytes.hex), flush=True)
