"""Tokens that are in the draft's vocabulary however rare they are in the completions, by kind.

The kinds, in the order in which they get their places:

    ends        end a reply: the eos ids of generation_config.json and config.json, and the tokenizer's
    template    added tokens that the chat template writes: begins and ends of turns, roles, thoughts; none of
                spaces and line ends alone, of which the template's own text is full
    thinking    other added tokens whose text says that they open or close thoughts
    seen        special tokens that the completions have
    bytes       the tokens of one byte each, with which any text can be spelled
    special     special tokens that the completions do not have

Reserved tokens are in none: their text says so, or they are one of a numbered series (`<unused7>`,
`<|extra_id_3|>`). Tokenizers have up to a thousand of them, and no model writes one. Neither are added
tokens that are not special: they are words, which have to earn their place. A thinking tag that is no token
of its own is spelled with ordinary ones, which do so as well.
"""

import base64
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import BadInput

_THOUGHTS = re.compile(r"think|thought|reason", re.IGNORECASE)
_RESERVED = re.compile(r"reserved|unused|placeholder", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
_WHOLE = "download or copy the target again, whole, and materialise target_model again."


def token_kinds(model: Path, counts: Counter[int], vocab_size: int) -> dict[str, list[int]]:
    """Ids of each kind, those with most occurrences first; ties go to the lower id.

    `model` is the target's folder. A token of several kinds is of the first; ids that the target does not
    have are left out. Raises BadInput where a file of the tokenizer cannot be read.
    """
    tokenizer = _read(model / "tokenizer.json")
    config = _read(model / "tokenizer_config.json")
    added = _added_tokens(tokenizer, config)
    texts = {number: str(one["content"]) for number, one in added.items()}
    reserved = _reserved(texts)
    special = {number for number, one in added.items() if one.get("special")} - reserved
    template = _chat_template(model, config)
    found = {
        "ends": _ends(model, config, texts),
        "template": {number for number, text in texts.items() if text.strip() and text in template},
        "thinking": {number for number, text in texts.items() if _THOUGHTS.search(text)} - reserved,
        "seen": {number for number in special if counts[number]},
        "bytes": _bytes(model, tokenizer),
        "special": special,
    }
    kinds: dict[str, list[int]] = {}
    taken: set[int] = set()
    for kind, ids in found.items():
        new = {number for number in ids if 0 <= number < vocab_size} - taken
        kinds[kind] = sorted(new, key=lambda number: (-counts[number], number))
        taken |= new
    return kinds


def _ends(model: Path, config: Mapping[str, Any], texts: Mapping[int, str]) -> set[int]:
    """vLLM stops at the ids of generation_config.json and at the tokenizer's own end."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        settings = _read(model / name)
        for block in (settings, settings.get("text_config") or {}):
            ends = block.get("eos_token_id")
            ids.update(ends if isinstance(ends, list) else [] if ends is None else [ends])
    named = config.get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    return ids | {number for number, one in texts.items() if one == text}


def _added_tokens(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    tokens = {int(one["id"]): one for one in tokenizer.get("added_tokens", ())}
    decoder = config.get("added_tokens_decoder") or {}
    return tokens | {int(number): one for number, one in decoder.items()}


def _reserved(texts: Mapping[int, str]) -> set[int]:
    series = Counter(_DIGITS.sub("0", text) for text in texts.values() if _DIGITS.search(text))
    return {
        number
        for number, text in texts.items()
        if _RESERVED.search(text) or series[_DIGITS.sub("0", text)] > 1
    }


def _bytes(model: Path, tokenizer: Mapping[str, Any]) -> set[int]:
    """Ids of the one-byte tokens, in whichever of three ways the tokenizer has them; maybe none.

    Pieces with byte fallback (`<0x00>` to `<0xFF>`), byte-level BPE (a letter for each byte), or the ranks of
    tiktoken, whose lines are a token in base64 and its id.
    """
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: pieces with their scores, in the order of ids
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    if names[0] not in vocabulary and "ByteLevel" in json.dumps(
        [tokenizer.get("pre_tokenizer"), tokenizer.get("decoder")]
    ):
        from tokenizers.pre_tokenizers import ByteLevel

        names = ByteLevel.alphabet()
    ids = {int(vocabulary[name]) for name in names if name in vocabulary}
    return ids or _bytes_of_ranks(model / "tiktoken.model")


def _bytes_of_ranks(path: Path) -> set[int]:
    if not path.is_file():
        return set()
    try:
        ranks = [line.split() for line in path.read_text().splitlines() if line]
        return {int(number) for token, number in ranks if len(base64.b64decode(token, validate=True)) == 1}
    except ValueError as error:
        raise BadInput(f"{path} holds no ranks of tiktoken ({error}): {_WHOLE}") from error


def _chat_template(model: Path, config: Mapping[str, Any]) -> str:
    path = model / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = config.get("chat_template") or ""
    # Older models keep several named templates in a list.
    return (
        template if isinstance(template, str) else "".join(str(one.get("template", "")) for one in template)
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise BadInput(f"{path} is no JSON ({error}): {_WHOLE}") from error
    return value if isinstance(value, dict) else {}
