"""speculators' client, `speculators regenerate-responses`, on the prompts of a benchmark."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.generation.process import Usage, run

_SECONDS = re.compile(r"Pipeline complete in ([\d.]+)s")


def regenerate(
    folder: Path,
    dataset: Path,
    base_url: str,
    model: str,
    tokenizer: Path,
    *,
    in_flight: int,
    max_tokens: int,
    sampling: dict[str, Any],
    limit: int | None = None,
) -> tuple[Usage, dict[str, float]]:
    """Run it in `folder`; returns what it used, and its seconds (without imports), samples and tokens.

    It loads the tokenizer that is called like the model: a link in its folder makes that one of `tokenizer`.
    Raises RuntimeError where a prompt is missing from its output, or there twice.
    """
    folder.mkdir(parents=True)
    (folder / model).symlink_to(tokenizer.absolute(), target_is_directory=True)
    command = [sys.executable, "-m", "speculators", "regenerate-responses"]
    command += ["--endpoint", f"{base_url}/v1/chat/completions", "--model", model]
    command += ["--dataset", str(dataset.absolute()), "--outfile", "samples.jsonl"]
    command += ["--concurrency", str(in_flight), "--max-tokens", str(max_tokens)]
    command += ["--sampling-params", json.dumps(sampling)]
    command += ["--limit", str(limit)] if limit is not None else []
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    usage = run(command, folder, offline)
    ids, tokens = [], 0
    with (folder / "samples.jsonl").open() as lines:
        for line in lines:
            row = json.loads(line)
            ids.append(row["primary_id"])
            tokens += row["metadata"]["usage"]["completion_tokens"]
    with dataset.open() as lines:
        wanted = sum(1 for _ in lines) if limit is None else limit
    if len(ids) != wanted or len(set(ids)) != wanted:
        raise RuntimeError(f"{len(ids)} samples of {len(set(ids))} prompts in {folder}, expected {wanted}")
    found = _SECONDS.search(usage.output)
    if found is None:
        raise RuntimeError(f"no summary in the output of speculators: {usage.output[-500:]}")
    return usage, {"seconds": float(found[1]), "samples": len(ids), "completion_tokens": tokens}
