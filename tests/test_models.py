"""The tiny Llama: what it answers is a walk with a clear winner at every step, the same every time."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import END, make_llama

_PROMPTS = ("What is a canal?", "hi", "List five things to check.", "Explain the tide to a child.")


@pytest.fixture(scope="module")
def loaded(tiny_llama: Path) -> Iterator[tuple[Any, Any]]:
    """Model and tokenizer; one thread, because threads that wait for each other cost more than this model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16).eval()
    yield model, AutoTokenizer.from_pretrained(tiny_llama)
    torch.set_num_threads(threads)


def greedy(model: Any, tokenizer: Any, text: str, limit: int = 150) -> tuple[list[int], float, Any]:
    """Completion, smallest margin between the first and the second logit, and the states of the whole."""
    import torch

    messages = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    completion: list[int] = []
    margin = float("inf")
    with torch.no_grad():
        while len(completion) < limit:
            out = model(torch.tensor([ids + completion]), output_hidden_states=True)
            best = out.logits[0, -1].float().topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            completion.append(int(best.indices[0]))
            if completion[-1] == tokenizer.eos_token_id:
                break
    return completion, margin, out.hidden_states


def test_greedy_answers_differ_by_prompt_end_and_have_a_wide_margin(loaded: tuple[Any, Any]) -> None:
    answers = [greedy(*loaded, text) for text in _PROMPTS]
    assert len({tuple(completion) for completion, _, _ in answers}) == len(_PROMPTS)
    assert all(completion[-1] == loaded[1].convert_tokens_to_ids(END) for completion, _, _ in answers)
    assert min(margin for _, margin, _ in answers) > 3  # of logits near 15, on which bfloat16 steps are 1/16


def test_neighbouring_layers_differ_more_than_any_tolerance(loaded: tuple[Any, Any]) -> None:
    import torch

    _, _, states = greedy(*loaded, _PROMPTS[0], limit=5)
    for one, other in itertools.pairwise(states):
        cosine = torch.nn.functional.cosine_similarity(one.float(), other.float(), dim=-1)
        assert cosine.mean() < 0.97


def test_the_same_seed_gives_the_same_files(tmp_path: Path, tiny_llama: Path) -> None:
    again = make_llama(tmp_path / "again")
    for path in tiny_llama.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_text_survives_the_tokenizer(loaded: tuple[Any, Any]) -> None:
    text = "Grüße, 1 € — naïve 日本\n\ttab"
    assert loaded[1].decode(loaded[1].encode(text, add_special_tokens=False)) == text
