"""Drift: how many samples would change if they were decoded to text and encoded again.

Nothing here does that to a sample, because the server's ids are the truth; but others train on
re-tokenised text. The share says how many samples that would have spoiled, at the least: a chat
template in between changes more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from eagle3_pipeline.samples.sample import Sample

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Drift:
    """`changed` of `checked` samples have other ids after decoding and encoding."""

    checked: int
    changed: int

    @property
    def share(self) -> float:
        """Changed of checked; 0 where none was checked."""
        return self.changed / max(self.checked, 1)

    def __add__(self, other: "Drift") -> "Drift":
        return Drift(self.checked + other.checked, self.changed + other.changed)


class Retokenizer:
    """Decodes with the target's own tokenizer and encodes again."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, model: Path, *, trust_remote_code: bool) -> Self | None:
        """The tokenizer of a model folder (seconds to load), or None where the folder has none."""
        if not any((model / name).is_file() for name in _TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        return cls(
            AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code, local_files_only=True)
        )

    def drift(self, samples: Sequence[Sample]) -> Drift:
        """The drift of the completions of `samples`; those without a completion are not counted."""
        bodies = [ids for one in samples if (ids := _body(one))]
        return Drift(len(bodies), sum(self._changes(ids) for ids in bodies))

    def _changes(self, ids: list[int]) -> bool:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False)) != ids


def _body(sample: Sample) -> list[int]:
    """The completion without its closing end-of-turn id, which is the template's to write."""
    ids = sample.completion_token_ids
    return ids[:-1] if sample.finish_reason == "stop" else ids
