"""The begin-of-sequence token: once in front of a prompt, never twice, and not left out.

A chat template that writes the token, rendered by a server whose tokenizer adds it again, gives two.
Models never saw that in training, and every hidden state after it is a little wrong.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from eagle3_pipeline.errors import BadInput


@dataclass(frozen=True)
class BeginToken:
    """Its id (None: the tokenizer has none) and whether the chat template writes it.

    A tokenizer may name a token that its template does not use (Kimi-K2's `[BOS]`): vLLM then sends
    the prompt without it, which is right, and only two in a row are wrong.
    """

    token_id: int | None
    expected: bool

    @classmethod
    def of(cls, model: Path) -> Self:
        """What the tokenizer files of a model folder say; none where they do not name one."""
        config = _json(model / "tokenizer_config.json")
        named = config.get("bos_token")
        token = named.get("content") if isinstance(named, dict) else named
        if not token:
            return cls(None, False)
        template = _template(model, config)
        # Written by its name, or literally as the very first thing: {{ '<s>' }}...
        written = "bos_token" in template or template.lstrip("{% '\"\n-").startswith(token)
        return cls(_id_of(token, config, model), written)

    def check(self, prompt_token_ids: list[int], name: str) -> None:
        """Raise BadInput unless the prompt called `name` begins with the token as it should."""
        if self.token_id is None:
            return
        count = 0
        while count < len(prompt_token_ids) and prompt_token_ids[count] == self.token_id:
            count += 1
        if count > 1:
            raise BadInput(
                f"{name}: {count} begin tokens (id {self.token_id}) at the start of the prompt, expected at "
                "most one. The target's chat template writes it and its tokenizer adds it again: take it out "
                "of the template, or set add_bos_token to false in tokenizer_config.json."
            )
        if self.expected and count == 0:
            raise BadInput(
                f"{name}: the prompt starts {prompt_token_ids[:6]}, expected one begin token "
                f"(id {self.token_id}), which the target's chat template writes. Does the server use "
                "another template (server.generation.extra_args)?"
            )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text())
    return value if isinstance(value, dict) else {}


def _template(model: Path, config: dict[str, Any]) -> str:
    file = model / "chat_template.jinja"
    return file.read_text() if file.is_file() else str(config.get("chat_template") or "")


def _id_of(token: str, config: dict[str, Any], model: Path) -> int | None:
    for name, entry in config.get("added_tokens_decoder", {}).items():
        if entry.get("content") == token:
            return int(name)
    tokenizer = _json(model / "tokenizer.json")
    for entry in tokenizer.get("added_tokens", []):
        if entry.get("content") == token:
            return int(entry["id"])
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    return vocabulary.get(token) if isinstance(vocabulary, dict) else None
