from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.samples.drift import Drift, Retokenizer
from tests.samples.test_sample import make_sample
from tests.samples.tokenizer import END, make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return make_tokenizer(model)


@pytest.fixture
def retokenizer(model: Path, tokenizer: Any) -> Retokenizer:
    found = Retokenizer.of(model, trust_remote_code=False)
    assert found is not None
    return found


def test_ids_that_the_tokenizer_would_not_choose_itself_are_counted(
    retokenizer: Retokenizer, tokenizer: Any
) -> None:
    own = [*tokenizer.encode("in the end"), tokenizer.eos_token_id]
    spelled = tokenizer.convert_tokens_to_ids(["t", "h", "e", END])  # the same text as the one token `the`
    cut = tokenizer.convert_tokens_to_ids(["Ã"])  # the first byte of a letter that the token limit cut
    samples = [
        make_sample(completion_token_ids=own),
        make_sample(completion_token_ids=spelled),
        make_sample(completion_token_ids=cut, finish_reason="length"),
        make_sample(completion_token_ids=[], finish_reason="refused"),
    ]
    assert retokenizer.drift(samples) == Drift(checked=3, changed=2)
    assert retokenizer.drift(samples[:1]) == Drift(checked=1, changed=0)


def test_marks_inside_a_completion_are_encoded_as_the_marks_that_they_are(
    retokenizer: Retokenizer, tokenizer: Any
) -> None:
    ids = [*tokenizer.encode("so "), tokenizer.eos_token_id, *tokenizer.encode("on"), tokenizer.eos_token_id]
    assert retokenizer.drift([make_sample(completion_token_ids=ids)]) == Drift(1, 0)


def test_a_folder_without_a_tokenizer_has_no_drift(tmp_path: Path) -> None:
    assert Retokenizer.of(tmp_path, trust_remote_code=False) is None


def test_the_share_is_that_of_all_that_were_checked() -> None:
    assert (Drift(8, 1) + Drift(2, 0)).share == 0.1
    assert Drift(0, 0).share == 0
