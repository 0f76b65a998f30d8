"""What is counted, and which tokens are in whatever their count."""

import json
from collections import Counter
from pathlib import Path

from eagle3_pipeline.samples import Sample
from eagle3_pipeline.samples.sample import Verdict
from eagle3_pipeline.vocabulary.counts import control_tokens, count_completions


def _sample(verdict: Verdict, completion: list[int]) -> Sample:
    return Sample(
        sample_id=f"{verdict}-t0",
        prompt_id=verdict,
        turn=0,
        prompt_token_ids=[7, 7, 7],
        completion_token_ids=completion,
        finish_reason="stop",
        content="",
        reasoning="",
        usage={},
        sampling={},
        server="",
        verdict=verdict,
    )


def test_only_completions_of_samples_that_train_are_counted() -> None:
    samples = [_sample("good", [1, 1, 2]), _sample("truncated", [3]), _sample("degenerate", [9] * 50)]
    assert count_completions(samples, train_truncated=True) == Counter({1: 2, 2: 1, 3: 1})
    assert count_completions(samples, train_truncated=False) == Counter({1: 2, 2: 1})


def test_ends_of_replies_and_what_the_template_writes_are_always_in_but_reserved_tokens_are_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 1}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    added = [{"id": 3, "content": "<|im_start|>"}, {"id": 4, "content": "<|reserved_0|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    decoder = {"5": {"content": "</think>"}, "6": {"content": "<|reserved_1|>"}}
    template = "{{ '<|im_start|>' + m['content'] + '</think>' }}"
    tokenizer = {"added_tokens_decoder": decoder, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert control_tokens(tmp_path) == {1, 2, 3, 5}
