"""How many tokens of the target a prompt has, rendered through the target's chat template."""

from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.prompts.parsing import ParsedPrompt, RowRejected

_UNKNOWN_REPLY = "."  # stands for the target's reply between two user turns: templates want one there


class ChatLength:
    """Counts tokens. The tokenizer is loaded at the first call, because that takes seconds."""

    def __init__(self, model_path: Path, *, trust_remote_code: bool = False) -> None:
        self._model_path = model_path
        self._trust_remote_code = trust_remote_code
        self._has_rendered = False

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            self._model_path, trust_remote_code=self._trust_remote_code, local_files_only=True
        )
        if not tokenizer.chat_template:
            raise BadInput(f"{self._model_path} has no chat template: an instruction-tuned target is wanted.")
        return tokenizer

    def __call__(self, parsed: ParsedPrompt) -> int:
        """Tokens up to the place where the target answers the last user turn.

        Replies in between are not known yet and count as one character. Raises RowRejected if the
        chat template does (one without system messages, for example) or fails at this row. Raises BadInput
        if there is none, or if it fails before it has rendered any row.
        """
        from jinja2 import TemplateError

        messages = [{"role": "system", "content": parsed.system}] if parsed.system else []
        for number, turn in enumerate(parsed.turns):
            if number:
                messages.append({"role": "assistant", "content": _UNKNOWN_REPLY})
            messages.append({"role": "user", "content": turn})
        tokenizer = self._tokenizer
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except TemplateError as error:
            raise RowRejected("template", str(error)) from error
        except (TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            if self._has_rendered:
                raise RowRejected("template", what) from error
            raise BadInput(
                f"tokenizer or chat template of {self._model_path} fails at the first prompt: {what}. "
                "Look at both there; a target whose chats can be rendered is wanted."
            ) from error
        self._has_rendered = True
        return len(ids)
