"""The stand-in's language: chat template, tokenizer, and answers that follow from the prompt's ids alone."""

import hashlib
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from tests.fakes.faults import Faults, strikes

_ENDLESS = 10**9


@dataclass(frozen=True)
class Answer:
    """One completion: ids as the server returns them, and the texts made of them."""

    token_ids: list[int]
    finish_reason: str
    content: str | None
    reasoning: str | None


class Language:
    """Tokenizer and chat template of the model folder, read without transformers."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._settings = json.loads((model / "tokenizer_config.json").read_text())
        template = model / "chat_template.jinja"
        source = template.read_text() if template.is_file() else self._settings["chat_template"]
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(source)
        config = json.loads((model / "config.json").read_text())
        text_config = config.get("text_config") or config
        self.hidden_size = int(text_config["hidden_size"])
        self.vocab_size = int(text_config["vocab_size"])
        self.eos = self._end_of_turn(config)
        special = set(self.tokenizer.get_added_tokens_decoder())
        self._plain = [
            id_ for id_ in range(self.tokenizer.get_vocab_size()) if id_ not in special and self._prints(id_)
        ]

    def _end_of_turn(self, config: dict[str, Any]) -> int:
        """The tokenizer's end token, which is what ends a turn; else the config's."""
        token = self._settings.get("eos_token")
        text = token["content"] if isinstance(token, dict) else token
        found = self.tokenizer.token_to_id(text) if text else None
        declared = config.get("eos_token_id", 0)
        return int(found if found is not None else declared[0] if isinstance(declared, list) else declared)

    def _prints(self, id_: int) -> bool:
        text = self.tokenizer.decode([id_])
        return bool(text.strip()) and text.isprintable() and "\N{REPLACEMENT CHARACTER}" not in text

    def render(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a conversation with the generation prompt; raises ValueError where the template refuses."""
        special = {name: _text(self._settings.get(name)) for name in ("bos_token", "eos_token")}
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **special)
        except jinja2.TemplateError as error:
            raise ValueError(str(error)) from error
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def likeliest(self, token: int, count: int) -> dict[int, float]:
        """Log-probabilities where `token` is said: `count` tokens, that one by far the likeliest."""
        others = [id_ for id_ in self._plain[:count] if id_ != token][: count - 1]
        return {token: -0.1} | {other: -5 - place / 10 for place, other in enumerate(others)}

    def answer(self, prompt: list[int], limit: int, faults: Faults, *, thinks: bool) -> Answer:
        """The completion of a prompt, the same in every process: at most `limit` ids."""
        chance = random.Random(hashlib.sha256(json.dumps(prompt).encode()).digest())
        length = _length(chance, prompt, faults)
        ids = chance.choices(self._plain, k=min(length, limit))
        if strikes(faults.degenerate_share, "degenerate", prompt):
            block = ids[:3] or self._plain[:3]
            length, ids = _ENDLESS, (block * (limit // 3 + 1))[:limit]
        finish_reason = "length"
        if length < limit:
            ids.append(self.eos)
            finish_reason = "stop"
        if not thinks or faults.no_reasoning:
            return Answer(ids, finish_reason, self.decode(ids), None)
        # Half of the answer is thought; one that is cut off never got beyond it, and has no content at all.
        thought = len(ids) if finish_reason == "length" else length // 2
        content = self.decode(ids[thought:]) if finish_reason == "stop" else None
        return Answer(ids, finish_reason, content, self.decode(ids[:thought]))

    def stuck(self, answer: Answer) -> Answer:
        """What vLLM makes of a sampled answer on a server that captures: one token over and over."""
        ids = answer.token_ids[:1] * len(answer.token_ids)
        return replace(answer, token_ids=ids, content=self.decode(ids))


def _length(chance: random.Random, prompt: list[int], faults: Faults) -> int:
    if strikes(faults.empty_share, "empty", prompt):
        return 0
    if strikes(faults.truncated_share, "truncated", prompt):
        return _ENDLESS
    if faults.long_tail:  # a log-normal with this sigma has a mean of 1.65 x its median, and 1 % above 10 x
        return max(1, round(faults.mean_tokens / 1.65 * chance.lognormvariate(0, 1)))
    return chance.randint(max(1, faults.mean_tokens // 2), max(1, faults.mean_tokens * 3 // 2))


def _text(token: Any) -> str:
    if isinstance(token, dict):
        return str(token["content"])
    return str(token or "")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
