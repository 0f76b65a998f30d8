"""Which tokens are always in, in the ways in which tokenizers say so."""

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.vocabulary.kinds import token_kinds
from tests.samples.tokenizer import END, make_tokenizer

_BYTE_LETTERS = 256


def _write(folder: Path, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def _added(*texts: str, special: bool = True, first: int = 0) -> list[dict[str, Any]]:
    return [{"id": first + n, "content": text, "special": special} for n, text in enumerate(texts)]


def _kinds(model: Path, counts: dict[int, int] | None = None, vocab_size: int = 1000) -> dict[str, list[int]]:
    return {kind: ids for kind, ids in token_kinds(model, Counter(counts or {}), vocab_size).items() if ids}


def test_each_token_is_of_its_first_kind_in_the_order_in_which_kinds_get_their_places(tmp_path: Path) -> None:
    texts = ("<|end|>", "<|user|>", "<think>", "<|tool|>", "<|image|>", "<|eot|>")
    words = _added("Wasserstoff", "<tool_call>", special=False, first=20)
    model = _write(
        tmp_path,
        config={"text_config": {"eos_token_id": 0}},
        generation_config={"eos_token_id": [0, 9]},
        tokenizer={"added_tokens": _added(*texts)},
        tokenizer_config={
            "added_tokens_decoder": {str(one["id"]): one for one in words},
            "chat_template": "{{ '<|user|>' + m['content'] + '<|end|>' }}",
            "eos_token": {"content": "<|eot|>"},
        },
    )
    kinds = token_kinds(model, Counter({3: 2}), 1000)
    assert list(kinds.items()) == [
        ("ends", [0, 5, 9]),
        ("template", [1]),
        ("thinking", [2]),
        ("seen", [3]),
        ("bytes", []),
        ("special", [4]),
    ]


def test_a_template_in_a_file_of_its_own_and_several_named_ones_are_read(tmp_path: Path) -> None:
    added = {"added_tokens": _added("<|user|>", "<|tool|>")}
    named = [{"name": "default", "template": "<|user|>"}, {"name": "tools", "template": "<|tool|>"}]
    model = _write(tmp_path, tokenizer=added, tokenizer_config={"chat_template": named})
    assert _kinds(model) == {"template": [0, 1]}
    (model / "chat_template.jinja").write_text("{{ '<|user|>' }}")
    assert _kinds(model) == {"template": [0], "special": [1]}


def test_tokens_of_spaces_and_line_ends_are_not_taken_for_written_by_the_template(tmp_path: Path) -> None:
    added = {"added_tokens": _added("    ", "\n", "<|user|>", special=False)}
    template = "{% if m %}\n    {{ '<|user|>' }}\n{% endif %}"
    model = _write(tmp_path, tokenizer=added, tokenizer_config={"chat_template": template})
    assert _kinds(model) == {"template": [2]}


def test_reserved_tokens_are_never_in_whether_they_say_so_or_are_numbered(tmp_path: Path) -> None:
    texts = (
        *(f"<|reserved_special_token_{n}|>" for n in range(3)),
        *(f"<SPECIAL_{n}>" for n in range(20, 1000)),
        "<unused>",
        "<|fim_2|>",  # one of a kind
    )
    model = _write(tmp_path, tokenizer={"added_tokens": _added(*texts)})
    assert _kinds(model, {0: 5, 4: 2}) == {"special": [len(texts) - 1]}


def test_thinking_tags_are_in_without_being_special_or_in_the_template(tmp_path: Path) -> None:
    texts = ("◁think▷", "◁/think▷", "<seed:think>", "<|thought|>", "<reasoning>", "<table>")
    model = _write(tmp_path, tokenizer={"added_tokens": _added(*texts, special=False)})
    assert _kinds(model) == {"thinking": [0, 1, 2, 3, 4]}


def test_within_a_kind_the_more_frequent_come_first_and_ties_go_to_the_lower_id(tmp_path: Path) -> None:
    model = _write(tmp_path, tokenizer={"added_tokens": _added("<a>", "<b>", "<c>", "<d>")})
    assert _kinds(model, {3: 7, 2: 1, 1: 1}) == {"seen": [3, 1, 2], "special": [0]}


def test_ids_beyond_the_target_s_vocabulary_are_left_out(tmp_path: Path) -> None:
    model = _write(tmp_path, tokenizer={"added_tokens": _added("<a>", "<b>")}, config={"eos_token_id": 5})
    assert _kinds(model, vocab_size=1) == {"special": [0]}


def test_the_letters_of_byte_level_tokenizers_are_the_bytes(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    kinds = _kinds(tmp_path)
    letters = set(tokenizer.get_vocab()) - {END, "th", "the"}
    assert kinds["ends"] == [tokenizer.eos_token_id]
    assert {tokenizer.convert_ids_to_tokens(one) for one in kinds["bytes"]} == letters
    assert len(letters) == _BYTE_LETTERS


@pytest.mark.parametrize("unigram", [False, True])
def test_the_pieces_of_byte_fallback_are_the_bytes(tmp_path: Path, unigram: bool) -> None:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "a"]
    vocabulary = [[piece, 0.0] for piece in pieces] if unigram else {one: n for n, one in enumerate(pieces)}
    model = _write(tmp_path, tokenizer={"model": {"vocab": vocabulary}, "decoder": {"type": "ByteFallback"}})
    assert _kinds(model) == {"bytes": list(range(1, 257))}


def test_words_of_one_letter_are_no_bytes_where_the_tokenizer_is_not_of_bytes(tmp_path: Path) -> None:
    model = _write(tmp_path, tokenizer={"model": {"type": "WordPiece", "vocab": {"a": 0, "b": 1}}})
    assert _kinds(model) == {}


def test_a_tokenizer_of_tiktoken_ranks_has_its_bytes_and_the_specials_of_its_config(tmp_path: Path) -> None:
    tokens = [b"t", b"h", b"\xff", b"th", "é".encode()]
    lines = (f"{base64.b64encode(token).decode()} {n}" for n, token in enumerate(tokens))
    decoder = {
        "900": {"content": "[BOS]", "special": True},
        "901": {"content": "<|im_end|>", "special": True},
        "902": {"content": "<think>", "special": False},
    }
    model = _write(
        tmp_path,
        generation_config={"eos_token_id": 901},
        tokenizer_config={"added_tokens_decoder": decoder, "eos_token": "[EOS]"},
    )
    (model / "tiktoken.model").write_text("\n".join(lines) + "\n")
    assert _kinds(model, {2: 3}) == {
        "ends": [901],
        "thinking": [902],
        "bytes": [2, 0, 1],
        "special": [900],
    }


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tiktoken.model"])
def test_a_cut_file_of_the_tokenizer_is_refused_with_its_path(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"added_tokens": [')
    with pytest.raises(BadInput, match=f"{name} .*copy the target again, whole"):
        _kinds(tmp_path)
