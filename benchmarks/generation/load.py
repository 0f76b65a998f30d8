"""The load of the benchmarks: invented prompts, a lineage that holds them, and its stand-in server.

Prompts lie in the lineage as the step `prompts` would leave them, and in a JSONL file with the same texts for
speculators' client.
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.generation.stand_in import MODEL
from eagle3_pipeline.errors import ServerDied
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.prompts.selection import digests_of_shards
from eagle3_pipeline.recipe import load_recipe

_WORDS = [
    *(
        "the",
        "of",
        "and",
        "to",
        "in",
        "that",
        "it",
        "is",
        "was",
        "for",
        "on",
        "with",
        "as",
        "at",
        "by",
        "from",
    ),
    *("this", "have", "not", "are", "what", "all", "when", "there", "can", "which", "how", "about", "many"),
    *("river", "letter", "engine", "garden", "window", "market", "bridge", "winter", "teacher", "recipe"),
    *("village", "signal", "mountain", "explain", "compare", "between", "without", "because", "example"),
]


@dataclass(frozen=True)
class Load:
    """Size of a measurement on the stand-in."""

    prompts: int = 25_000
    shards: int = 50
    in_flight: int = 200
    longest: int = 8192
    """Most tokens of a reply."""
    ms_per_token: float = 2.0
    """Milliseconds: 2 is fifteen times faster than 33 tokens a second and request."""

    @property
    def per_shard(self) -> int:
        """Prompts of a shard."""
        return self.prompts // self.shards


@dataclass(frozen=True)
class Running:
    """What collect_samples asks of a server."""

    base_url: str
    model: str
    process: "subprocess.Popen[bytes] | None" = None
    fingerprint: str = "stand-in"

    @property
    def spec(self) -> "Running":
        """The specification, of which only the fingerprint is asked."""
        return self

    def check_alive(self) -> None:
        """Raise ServerDied when the process is known and gone."""
        if self.process is not None and self.process.poll() is not None:
            raise ServerDied(f"the stand-in ended with {self.process.returncode}")


@contextmanager
def serving(events: Path, ms_per_token: float) -> Iterator[Running]:
    """A stand-in that runs, with its events in a file; it is killed at the end."""
    command = [sys.executable, "-m", "benchmarks.generation.stand_in", str(events)]
    with subprocess.Popen([*command, "--ms-per-token", str(ms_per_token)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        try:
            yield Running(f"http://127.0.0.1:{port}", MODEL, process)
        finally:
            process.kill()


def invented(count: int) -> list[str]:
    """`count` prompts of 100 to 300 words, each with its number in front."""
    chance = random.Random(0)
    return [
        f"No. {number}: {' '.join(chance.choices(_WORDS, k=chance.randint(100, 300)))}?"
        for number in range(count)
    ]


def write_lineage(folder: Path, recipe: dict[str, Any], texts: Sequence[str]) -> tuple[Lineage, Path]:
    """A recipe for `texts` in `folder`, its prompts made, and the path of its file; no target but a name."""
    folder.mkdir(parents=True)
    (folder / "source.jsonl").write_text("{}\n")
    (folder / "model").mkdir()
    path = folder / "recipe.yaml"
    given = {
        "name": "benchmark",
        "target": {"path": "model"},
        "extraction": {"layers": [1, 2]},
        "evaluation": {"sets": [{"name": "none", "path": "source.jsonl"}]},
    }
    path.write_text(yaml.safe_dump({**given, **recipe}, sort_keys=False))
    lineage = Lineage(load_recipe(str(path), folder), folder / "storage")
    target = lineage.target_model()
    target.folder.mkdir(parents=True)
    target.finish([], {"model_path": str(folder / "model"), "model_fingerprint": "none"})
    prompts = [Prompt(f"{number:05d}", (text,), None, "source") for number, text in enumerate(texts)]
    place = lineage.prompts()
    place.folder.mkdir(parents=True)
    file = place.folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt.to_json()) + "\n" for prompt in prompts))
    place.finish(
        [file],
        {
            "count": len(prompts),
            "validation": [],  # all are sampled alike
            "shards": digests_of_shards(prompts, lineage.recipe.prompts),
        },
    )
    return lineage, path


def recipe_of(texts: Sequence[str], per_shard: int, generation: dict[str, Any]) -> dict[str, Any]:
    """The sections of a recipe that a measurement sets."""
    plan = {"sources": [{"path": "source.jsonl"}], "count": len(texts), "per_shard": per_shard}
    return {"prompts": plan, "generation": generation}


def write_dataset(path: Path, texts: Sequence[str]) -> Path:
    """The same prompts as a JSONL file with `id` and `prompt`."""
    rows = ({"id": f"{number:05d}", "prompt": text} for number, text in enumerate(texts))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
