"""What the stand-in says of tokens. No record has it: tests/real holds it against the real server."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.process import stand_in
from tests.fakes.record import SERVED_NAME, ask
from tests.fakes.test_recorded import shape

PROMPT = [0, 1, 300, 301, 4, 2]


def answers_about_tokens(client: Any, model: str) -> dict[str, Any]:
    """What a server says of the likeliest tokens after a prompt, and of the text of tokens."""
    question = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 20,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }
    return {
        "logprobs": ask(client, "POST", "/v1/completions", question),
        "text": ask(client, "POST", "/detokenize", {"model": model, "tokens": PROMPT}),
    }


def shape_of_tokens(answer: dict[str, Any]) -> dict[str, str]:
    """As `shape`, where names that are token ids are all the same name."""
    return {re.sub(r"token_id:\d+", "token_id", path): kind for path, kind in shape(answer).items()}


def require_likeliest(answer: dict[str, Any]) -> None:
    """Twenty tokens, the said one first, and falling from there."""
    (choice,) = answer["body"]["choices"]
    found = choice["logprobs"]
    (likeliest,) = found["top_logprobs"]
    assert len(likeliest) == 20
    assert list(likeliest.values()) == sorted(likeliest.values(), reverse=True)
    said = f"token_id:{choice['token_ids'][0]}"
    assert next(iter(likeliest)) == said
    assert found == {
        "text_offset": [0],
        "token_logprobs": [likeliest[said]],
        "tokens": [said],
        "top_logprobs": [likeliest],
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> dict[str, Any]:
    with stand_in(tmp_path_factory.mktemp("stand-in"), tiny_llama) as server:
        return answers_about_tokens(server.client, SERVED_NAME)


def test_log_probabilities_have_the_form_of_vllms_protocol(answers: dict[str, Any]) -> None:
    require_likeliest(answers["logprobs"])


def test_a_token_has_its_text_special_ones_included(answers: dict[str, Any]) -> None:
    text = answers["text"]["body"]["prompt"]
    assert text.startswith("<|bos|><|user|>")
    assert text.endswith("<|end|><|assistant|>")
    assert answers["text"]["body"] == {"prompt": text}
