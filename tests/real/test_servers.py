"""The real vLLM through the project's own code: its answers, and the counting of its draft."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.evaluation.greedy import greedy_agreement, other_batch_size
from eagle3_pipeline.evaluation.measurement import Measurement, measure
from eagle3_pipeline.generation.collection import collect_samples
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.prompts.evaluation import read_set
from eagle3_pipeline.prompts.selection import make_prompts
from eagle3_pipeline.recipe import load_recipe
from eagle3_pipeline.samples import SAMPLES_NAME, Sample, read_samples
from eagle3_pipeline.serving.server import RunningServer, open_server
from eagle3_pipeline.serving.specification import evaluation_server, generation_server
from eagle3_pipeline.target import make_target
from tests.drafts import make_draft
from tests.fakes.process import SERVED_NAME, stand_in
from tests.fakes.test_logprobs import answers_about_tokens, require_likeliest, shape_of_tokens
from tests.recipes import distinct_prompts, tiny_recipe, write_prompts

pytestmark = pytest.mark.real


def greedy(model: Any, sample: Sample) -> list[int]:
    """The completion of a sample by a Hugging Face forward, token after token."""
    import torch

    ids = torch.tensor([sample.prompt_token_ids])
    with torch.no_grad():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False, pad_token_id=0
        )
    completion: list[int] = found[0, ids.shape[1] :].tolist()
    return completion


def test_collected_samples_are_what_the_model_answers_greedily(
    real_lineage: Lineage, tiny_llama: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    make_prompts(real_lineage)
    shards = real_lineage.recipe.shards
    server = partial(open_server, generation_server(real_lineage), real_lineage.logs)
    made = collect_samples(real_lineage, shards, server, lambda shard, manifest: None)
    assert [manifest.shard for manifest in made] == list(shards)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).eval()
    for shard in shards:
        samples = read_samples(real_lineage.synthetic_samples(shard).folder / SAMPLES_NAME)
        assert len(samples) == real_lineage.recipe.prompts.per_shard
        for sample in samples:
            assert sample.completion_token_ids == greedy(model, sample), sample.sample_id


def answered(lineage: Lineage, server: RunningServer, *, with_draft: bool, in_flight: int = 1) -> Measurement:
    settings = lineage.recipe.evaluation.model_copy(update={"concurrency": in_flight})
    return measure(
        server,
        read_set(settings.sets[0]),
        settings,
        name="tiny",
        with_draft=with_draft,
        request_timeout_s=60,
    )


def measured(lineage: Lineage, draft: Path | None, logs: Path) -> Measurement:
    with open_server(evaluation_server(lineage, draft), logs, stop=draft is not None) as server:
        return answered(lineage, server, with_draft=draft is not None)


def test_a_draft_of_known_quality_is_measured_as_that_and_changes_no_answer(
    real_lineage: Lineage, tiny_llama: Path, tmp_path: Path
) -> None:
    plain = measured(real_lineage, None, tmp_path)
    shares = {}
    for looks_back in (True, False):
        draft = make_draft(tmp_path / f"draft-{looks_back}", tiny_llama, looks_back=looks_back)
        found = measured(real_lineage, draft, tmp_path)
        assert found.replies == plain.replies
        assert found.acceptance is not None
        drafts = found.acceptance.drafts
        shares[looks_back] = [count / drafts for count in found.acceptance.accepted_per_position]
    assert shares[True][0] > 0.9  # it knows the graph and the bit; what is past the end of an answer is lost
    assert 0.3 < shares[False][0] < 0.7  # it knows the graph only
    assert shares[False][0] > shares[False][1] > shares[False][2]


def noisy(folder: Path, tiny_llama: Path) -> Path:
    """The tiny Llama with random weights: many of its choices are near ties, which rounding tips."""
    import torch
    from transformers import AutoModelForCausalLM

    shutil.copytree(tiny_llama, folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1)  # norms
            else:  # logits of a standard deviation of 3
                weight.normal_(std=0.4 if "lm_head" in name else weight.shape[1] ** -0.5, generator=generator)
    model.save_pretrained(folder)
    return folder


def test_greedy_replies_part_with_a_draft_at_near_ties_as_plain_ones_do_and_a_wrong_token_is_found(
    tiny_llama: Path, tmp_path: Path
) -> None:
    model = noisy(tmp_path / "model", tiny_llama)
    path = tiny_recipe(tmp_path / "recipe", model, evaluation={"max_completion_tokens": 100})
    write_prompts(path.parent / "evaluation.jsonl", distinct_prompts(20, seed=3))
    lineage = Lineage(load_recipe(str(path), path.parent), tmp_path / "storage")
    make_target(lineage)
    drafted = measured(lineage, make_draft(tmp_path / "draft", model), tmp_path)
    rows = other_batch_size(1, lineage.recipe.evaluation.speculative_tokens)
    with open_server(evaluation_server(lineage, None), tmp_path, stop=True) as server:
        plain = answered(lineage, server, with_draft=False)
        other = answered(lineage, server, with_draft=False, in_flight=rows)

        def compare(with_draft: dict[str, tuple[int, ...]]) -> dict[str, Any]:
            return greedy_agreement(
                server,
                plain.prompts,
                plain=plain.replies,
                other_batch=other.replies,
                with_draft=with_draft,
                request_timeout_s=60,
            )

        with httpx.Client(base_url=server.base_url, timeout=60, trust_env=False) as client:
            real = answers_about_tokens(client, server.model)
        with stand_in(tmp_path / "stand-in", model) as fake:
            said = answers_about_tokens(fake.client, SERVED_NAME)
        require_likeliest(real["logprobs"])
        assert shape_of_tokens(said) == shape_of_tokens(real)
        assert said["text"] == real["text"]
        facts = compare(drafted.replies)
        assert facts["compared"] == 20
        assert facts["largest_gap"] <= facts["bound"]
        name, ids = next(iter(plain.replies.items()))
        wrong = (ids[0] + 1) % 512
        words = rf"token 1 of the greedy reply: .* \(id {ids[0]}\) without the draft, .* \(id {wrong}\)"
        with pytest.raises(QualityError, match=words):
            compare({**plain.replies, name: (wrong, *ids[1:])})
