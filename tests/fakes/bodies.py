"""The bodies of vLLM's answers, and its form of an error."""

import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse

from tests.fakes.arguments import Arguments
from tests.fakes.words import Answer


class RefusalError(Exception):
    """An answer in vLLM's form of an error."""

    def __init__(
        self, status: int, message: str, kind: str, param: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
        self.response = JSONResponse(body, status_code=status, headers=headers)


def model_card(arguments: Arguments, created: int) -> dict[str, Any]:
    """The one model that /v1/models lists."""
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex[:16]}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": arguments.served_name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": str(arguments.model),
        "parent": None,
        "max_model_len": arguments.max_model_len,
        "permission": [permission],
    }


def usage(prompt: list[int], answer: Answer) -> dict[str, Any]:
    """Token counts."""
    total = len(prompt) + len(answer.token_ids)
    return {
        "prompt_tokens": len(prompt),
        "total_tokens": total,
        "completion_tokens": len(answer.token_ids),
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def chat_body(
    identity: str,
    model: str,
    prompt: list[int],
    answer: Answer,
    parameters: dict[str, Any] | None,
    with_ids: bool,
) -> dict[str, Any]:
    """The body of a chat completion."""
    message = {
        "role": "assistant",
        "content": answer.content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": answer.reasoning,
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
        "stop_reason": None,
        "token_ids": answer.token_ids if with_ids else None,
        "routed_experts": None,
    }
    return {
        "id": identity,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": "vllm-0.32.0-standin0",
        "usage": usage(prompt, answer),
        "prompt_logprobs": None,
        "prompt_token_ids": prompt if with_ids else None,
        "prompt_text": None,
        "kv_transfer_params": parameters,
        "ec_transfer_params": None,
        "metrics": None,
    }


def logprobs_body(
    token_ids: list[int], likeliest: Callable[[int], dict[int, float]], name: Callable[[int], str]
) -> dict[str, Any]:
    """Log-probabilities of a completion's tokens and of those that could have been in their places."""
    names, values = [name(token) for token in token_ids], [likeliest(token) for token in token_ids]
    return {
        "text_offset": [sum(map(len, names[:place])) for place in range(len(names))],
        "token_logprobs": [found[token] for token, found in zip(token_ids, values, strict=True)],
        "tokens": names,
        "top_logprobs": [{name(token): value for token, value in found.items()} for found in values],
    }


def completion_body(
    identity: str,
    model: str,
    prompt: list[int],
    answer: Answer,
    parameters: dict[str, Any] | None,
    with_ids: bool,
    logprobs: dict[str, Any] | None,
) -> dict[str, Any]:
    """The body of a completion."""
    choice = {
        "index": 0,
        "text": answer.content,
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
        "stop_reason": None,
        "token_ids": answer.token_ids if with_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt if with_ids else None,
        "routed_experts": None,
    }
    return {
        "id": identity,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": "vllm-0.32.0-standin0",
        "usage": usage(prompt, answer),
        "kv_transfer_params": parameters,
        "ec_transfer_params": None,
        "metrics": None,
    }
