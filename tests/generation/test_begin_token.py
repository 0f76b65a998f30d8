import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.generation.begin_token import BeginToken


def make_model(folder: Path, template: str, token: Any = "<s>", **config: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": token, **config}))
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = {"added_tokens": [{"id": 1, "content": "<s>"}], "model": {"vocab": {"<begin>": 9}}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize(
    "template", ["{{ bos_token }}{% for m in messages %}", "{{ '<s>' }}{{ x }}", "<s>hello"]
)
def test_a_template_that_writes_the_token_wants_exactly_one(template: str, tmp_path: Path) -> None:
    begin = BeginToken.of(make_model(tmp_path, template))
    begin.check([1, 5, 1, 6], "a-t0")
    for wrong in ([1, 1, 5], [5, 6], []):
        with pytest.raises(BadInput, match="a-t0"):
            begin.check(wrong, "a-t0")


def test_a_token_that_the_template_does_not_use_may_be_missing_but_never_doubled(tmp_path: Path) -> None:
    begin = BeginToken.of(make_model(tmp_path, "{% for m in messages %}{{ m }}{% endfor %}"))
    begin.check([5, 6], "a-t0")
    with pytest.raises(BadInput, match="2 begin tokens"):
        begin.check([1, 1, 5], "a-t0")


@pytest.mark.parametrize("named", [None, ""])
def test_a_tokenizer_without_the_token_is_not_checked(named: str | None, tmp_path: Path) -> None:
    begin = BeginToken.of(make_model(tmp_path, "{{ x }}", token=named))
    begin.check([1, 1], "a-t0")
    assert begin.token_id is None


def test_the_id_is_found_wherever_the_tokenizer_keeps_it(tmp_path: Path) -> None:
    assert BeginToken.of(make_model(tmp_path, "")).token_id == 1
    assert BeginToken.of(make_model(tmp_path, "", token={"content": "<begin>"})).token_id == 9
    decoder = {"163584": {"content": "[BOS]"}}
    assert BeginToken.of(make_model(tmp_path, "", "[BOS]", added_tokens_decoder=decoder)).token_id == 163584
    assert BeginToken.of(make_model(tmp_path, "", token="<unheard>")).token_id is None
