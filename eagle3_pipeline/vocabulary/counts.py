"""How often each token of the target occurs in the completions that train, and which tokens are always in.

Only completions count: the draft proposes what the target writes, never what a user types.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples import SAMPLES_NAME, Sample, iter_samples


def count_tokens(lineage: Lineage) -> Counter[int]:
    """Occurrences of each token id in the completions of all samples of the run that train."""
    counts: Counter[int] = Counter()
    for shard in lineage.recipe.shards:
        place = lineage.synthetic_samples(shard)
        place.require()
        samples = iter_samples(place.folder / SAMPLES_NAME)
        counts.update(count_completions(samples, lineage.recipe.generation.train_truncated))
    return counts


def count_completions(samples: Iterable[Sample], train_truncated: bool) -> Counter[int]:
    """Occurrences of each token id in the completions of the samples that train."""
    counts: Counter[int] = Counter()
    for sample in samples:
        if sample.trains(train_truncated):
            counts.update(sample.completion_token_ids)
    return counts


def control_tokens(model: Path) -> frozenset[int]:
    """Ids that end a reply, and the added tokens that the chat template writes (ends of turns, thoughts).

    They decide where a reply ends, however rare they are, so they are always in the draft's vocabulary.
    Added tokens that no template writes (reserved ones, often hundreds) have to earn their place.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        settings = _read(model / name)
        for block in (settings, settings.get("text_config") or {}):
            ends = block.get("eos_token_id")
            ids.update(ends if isinstance(ends, list) else [] if ends is None else [ends])
    template = _chat_template(model)
    ids.update(number for number, text in _added_tokens(model).items() if text and text in template)
    return frozenset(ids)


def _added_tokens(model: Path) -> dict[int, str]:
    tokens = {one["id"]: one["content"] for one in _read(model / "tokenizer.json").get("added_tokens", ())}
    decoder = _read(model / "tokenizer_config.json").get("added_tokens_decoder") or {}
    return tokens | {int(number): one["content"] for number, one in decoder.items()}


def _chat_template(model: Path) -> str:
    path = model / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = _read(model / "tokenizer_config.json").get("chat_template") or ""
    # Older models keep several named templates in a list.
    return (
        template if isinstance(template, str) else "".join(str(one.get("template", "")) for one in template)
    )


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return value
