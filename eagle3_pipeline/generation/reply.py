"""A reply as the server gave it, and the three ways in which it gives none."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import ServerError


@dataclass(frozen=True)
class Reply:
    """One answered request. The ids are the server's; the texts are never None."""

    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    finish_reason: str
    content: str
    reasoning: str
    usage: dict[str, int] = field(default_factory=dict)
    states_file: Path | None = None
    """Where a server that captures while it generates leaves the hidden states, by and by."""


class RequestRefused(Exception):
    """The server answered HTTP 400, 413 or 422: it will never answer this request."""


class Unanswered(Exception):
    """No reply, for a `reason` short enough to be counted by.

    `again`: worth another try at once. `may_be_the_prompt`: the server failed at this request (HTTP 500, at
    each attempt), which may lie in the prompt or in the server.
    """

    def __init__(
        self,
        reason: str,
        detail: str,
        *,
        again: bool,
        may_be_the_prompt: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.again = again
        self.may_be_the_prompt = may_be_the_prompt
        self.retry_after_s = retry_after_s


def read_reply(body: Any) -> Reply:
    """The reply in the JSON body of an HTTP 200; raises ServerError where vLLM's token ids are missing."""
    try:
        choice = body["choices"][0]
        message = choice["message"]
        reply = Reply(
            prompt_token_ids=[int(one) for one in body["prompt_token_ids"]],
            completion_token_ids=[int(one) for one in choice["token_ids"]],
            finish_reason=str(choice["finish_reason"] or "abort"),  # null: it was not finished
            content=message.get("content") or "",
            # vLLM renamed reasoning_content to reasoning; a server has one of them.
            reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
            usage=_usage(body),
            states_file=_states_file(body),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(
            f"a reply without a message or token ids ({error!r} in {str(body)[:200]}). Expected vLLM's "
            "/v1/chat/completions with return_token_ids (0.10.2 or later): check server.generation.python."
        ) from error
    if reply.finish_reason == "abort":
        raise Unanswered("aborted", "the server dropped the request", again=True)
    return reply


def _usage(body: dict[str, Any]) -> dict[str, int]:
    """The server's counts; its nested details and what it leaves null stay out."""
    usage = body.get("usage") or {}
    return {name: value for name, value in usage.items() if type(value) is int}


def _states_file(body: dict[str, Any]) -> Path | None:
    named = (body.get("kv_transfer_params") or {}).get("hidden_states_path")
    return Path(named) if named else None
