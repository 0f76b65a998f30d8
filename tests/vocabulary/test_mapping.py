"""The map between the draft's tokens and the target's: its two directions, its file, the step itself."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_pipeline.errors import BadInput, DamagedFile
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples import SAMPLES_NAME, Sample, write_samples
from eagle3_pipeline.vocabulary.base_mapping import read_base_mapping
from eagle3_pipeline.vocabulary.mapping import (
    VOCABULARY_NAME,
    coverage,
    make_vocabulary,
    read_mapping,
    verify_mapping,
    write_mapping,
)
from eagle3_pipeline.vocabulary.selection import build_mapping
from tests.generation.world import make_recipe
from tests.recipes import finish_prompts

END, TOOL = 49, 48


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        ([0, -1], [1, 0, 0], "which is not above it"),
        ([0, 2], [1, 0, 1], "leads outside"),
        ([0, 1], [1, 1, 0], "not the 2 of d2t"),
        ([0, 1], [1, 0, 1, 0], r"expected bool \[3\]"),
    ],
)
def test_a_map_that_contradicts_itself_is_refused(d2t: list[int], t2d: list[int], message: str) -> None:
    with pytest.raises(DamagedFile, match=message):
        verify_mapping(torch.tensor(d2t), torch.tensor(t2d, dtype=torch.bool), 3)


def test_a_written_map_is_read_back_and_a_cut_one_is_refused(tmp_path: Path) -> None:
    counts = Counter({3: 2, 8: 5})
    d2t, t2d = build_mapping(counts, 2, 10)
    path = tmp_path / "vocabulary.safetensors"
    write_mapping(path, d2t, t2d)
    assert all(torch.equal(a, b) for a, b in zip(read_mapping(path), (d2t, t2d), strict=True))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DamagedFile, match="Materialise vocabulary_map again"):
        read_mapping(path)


def test_coverage_is_the_share_of_occurrences_not_of_tokens() -> None:
    counts = Counter({0: 90, 1: 9, 2: 1})
    _, t2d = build_mapping(counts, 1, 4)
    assert coverage(t2d, counts) == 0.9


def test_the_map_of_a_base_draft_is_kept_as_it_is(tmp_path: Path) -> None:
    d2t = torch.tensor([1, 1, 4])
    weights = {"d2t": d2t, "lm_head.weight": torch.zeros(3, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    kept, t2d = read_base_mapping(tmp_path, 10)
    verify_mapping(kept, t2d, 10)
    assert torch.equal(kept, d2t)
    with pytest.raises(BadInput, match="draft of another target"):
        read_base_mapping(tmp_path, 6)


def test_a_base_draft_without_map_needs_the_whole_vocabulary(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(5, 2)}, tmp_path / "model.safetensors")
    d2t, t2d = read_base_mapping(tmp_path, 5)
    verify_mapping(d2t, t2d, 5)
    with pytest.raises(BadInput, match="head of 5 tokens and no d2t"):
        read_base_mapping(tmp_path, 6)


# --- the step

_FIRST, _SECOND = [0, 1, 2, 3, 0, 1, 4, END], [10, 11, 12, 13, 10, 11, END]
_TRAINING, _HELD_OUT = [*([0, 1, 2] * 9), 5, 6, END], [0, 1, 2, 7, 0, 1, 2, END]


def _made(root: Path, completions: list[list[int]], validation: list[str], **sections: Any) -> Lineage:
    """A target of 50 tokens, and one sample for each completion, the n-th of prompt pn, two in a shard."""
    lineage = Lineage(make_recipe(root, len(completions), 2, **sections), root / "storage")
    model = root / "model"
    added = [{"id": TOOL, "content": "<|tool|>", "special": True}]
    (model / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    target = lineage.target_model()
    if target.manifest() is None:
        target.folder.mkdir(parents=True)
        content = target.inputs["content"]
        target.finish([], {"model_path": str(model), "model_fingerprint": content, "vocab_size": 50})
    finish_prompts(lineage, validation)
    for number, shard in enumerate(lineage.recipe.shards):
        place = lineage.synthetic_samples(shard)
        path = place.folder / SAMPLES_NAME
        first = 2 * number
        write_samples(path, [_sample(f"p{n}", completions[n]) for n in (first, first + 1)])
        place.finish([path], {})
    return lineage


def _sample(prompt: str, completion: list[int]) -> Sample:
    return Sample(
        sample_id=f"{prompt}-t0",
        prompt_id=prompt,
        turn=0,
        prompt_token_ids=[40],
        completion_token_ids=completion,
        finish_reason="stop",
        content="",
        reasoning="",
        usage={},
        sampling={},
        server="",
        verdict="good",
    )


def _step(root: Path, draft_tokens: int = 4, **sections: Any) -> Lineage:
    completions = [_HELD_OUT, _FIRST, _TRAINING, _TRAINING]
    return _made(root, completions, ["p0"], vocabulary={"draft_tokens": draft_tokens}, **sections)


def test_the_step_counts_what_trains_keeps_what_is_always_in_and_says_what_can_be_reached(
    tmp_path: Path,
) -> None:
    lineage = _step(tmp_path)
    manifest = make_vocabulary(lineage)
    d2t, t2d = read_mapping(lineage.vocabulary_map().folder / VOCABULARY_NAME)
    assert (d2t + torch.arange(4)).tolist() == [0, 1, TOOL, END]
    assert t2d.nonzero().flatten().tolist() == [0, 1, TOOL, END]
    facts = manifest.facts
    assert facts["distinct_tokens"] == len({*_FIRST, *_TRAINING})  # 7 is in the held-out reply alone
    assert facts["coverage"] == (5 + 2 * 19) / (len(_FIRST) + 2 * len(_TRAINING))
    assert facts["always_in"] == {
        "ends": 1,
        "template": 0,
        "thinking": 0,
        "seen": 0,
        "bytes": 0,
        "special": 1,
    }
    assert facts["always_left_out"] == 0
    assert facts["held_out_tokens"] == len(_HELD_OUT)
    assert facts["held_out_coverage"] == 5 / 8
    # 0 stands: 1, then 2 is missing; 2: 7 missing; 7: 0 1 yes, 2 missing; 2: the end
    assert facts["best_acceptance_length"] == 1 + (1 + 0 + 2 + 1) / 4
    assert facts["speculative_tokens"] == 3
    own = {"coverage": 5 / 8, "best_acceptance_length": facts["best_acceptance_length"]}
    assert {"draft_tokens": 4, **own} in facts["sizes"]
    assert facts["sizes"][-1]["draft_tokens"] == len({*_FIRST, *_TRAINING, TOOL})


def test_a_base_draft_keeps_its_map_and_the_facts_say_what_it_lacks(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    ids = torch.tensor([0, 1, 2, 7])
    weights = {"d2t": ids - torch.arange(4), "lm_head.weight": torch.zeros(4, 2)}
    save_file(weights, base / "model.safetensors")
    (base / "config.json").write_text("{}")
    lineage = _step(tmp_path, base_draft={"path": str(base)})
    place = lineage.base_draft()
    place.folder.mkdir(parents=True)
    place.finish([], {"model_path": str(base), "model_fingerprint": "base"})
    facts = make_vocabulary(lineage).facts
    d2t, _ = read_mapping(lineage.vocabulary_map().folder / VOCABULARY_NAME)
    assert (d2t + torch.arange(4)).tolist() == [0, 1, 2, 7]
    assert facts["from_base_draft"]
    assert facts["always_left_out"] == 2
    assert facts["held_out_coverage"] == 7 / 8
    own = next(row for row in facts["sizes"] if row["draft_tokens"] == 4)
    assert own["coverage"] == facts["held_out_coverage"]
    assert own["best_acceptance_length"] == facts["best_acceptance_length"]


def test_without_held_out_replies_no_ceiling_is_claimed(tmp_path: Path) -> None:
    lineage = _made(tmp_path, [_FIRST, _SECOND], [], vocabulary={"draft_tokens": 4})
    assert not {"sizes", "best_acceptance_length"} & set(make_vocabulary(lineage).facts)


def test_the_same_samples_give_the_same_file_wherever_and_it_is_made_once(tmp_path: Path) -> None:
    made = [make_vocabulary(_step(tmp_path / name)) for name in ("here", "there")]
    assert made[0].files == made[1].files
    assert made[0].facts == made[1].facts
    lineage = _step(tmp_path / "here")
    path = lineage.vocabulary_map().folder / VOCABULARY_NAME
    path.write_bytes(b"")
    assert make_vocabulary(lineage) == made[0]
    assert path.read_bytes() == b""


def test_a_map_of_another_size_tokenizer_or_corpus_is_never_picked_up(tmp_path: Path) -> None:
    first = _step(tmp_path)
    make_vocabulary(first)
    places = {first.vocabulary_map().folder}
    larger = _step(tmp_path, draft_tokens=6)
    assert make_vocabulary(larger).facts["draft_tokens"] == 6
    places.add(larger.vocabulary_map().folder)
    whole = _step(tmp_path, run={"shards": 1})
    assert make_vocabulary(whole).facts["distinct_tokens"] == len(set(_FIRST))
    places.add(whole.vocabulary_map().folder)
    (tmp_path / "model" / "vocab.json").write_text("{}")
    retokenized = _step(tmp_path)
    assert retokenized.vocabulary_map().manifest() is None
    places.add(retokenized.vocabulary_map().folder)
    assert len(places) == 4


def test_prompts_that_judge_are_a_part_of_what_the_map_is_made_from(tmp_path: Path) -> None:
    completions = [_FIRST, _SECOND, _TRAINING, _TRAINING]
    places = set()
    for name, validation in (("one", ["p0"]), ("two", ["p0", "p1"])):
        lineage = _made(tmp_path / name, completions, validation)
        places.add(lineage.vocabulary_map().fingerprint)
    assert len(places) == 2
