"""A canary for the server that captures while it generates: does it still say what a plain server says?

On such a server each step also verifies a token that the capture proposes. When sampling, vLLM then gives
one token over and over, with HTTP 200 and states that look well; a draft learns nothing from that. Greedily
it is right with the versions that were tried. So the same few prompts are answered by a plain server once,
and by the capturing one at each opening, before anything is recorded.

    canary/<fingerprint of the plain server>.json      prompts, its token ids, and what was as good as each
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from eagle3_pipeline.durable_files import write_json
from eagle3_pipeline.errors import ServerRefused, ServerStalled
from eagle3_pipeline.generation.captured_states import WANTS_STATES
from eagle3_pipeline.generation.life import Running

_PROMPTS = (
    "Name the planets of the solar system, from the sun outwards.",
    "Write a Python function that reverses a list in place.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Explain step by step.",
    "Tell a short story about a lighthouse keeper and a seagull.",
)
_TOKENS = 24
_LIMIT_S = 300.0
# Two servers round differently: the capturing one computes two positions of a request in each step. What
# follows another token is another text, so the comparison of a prompt ends there, and the token must have
# been as good within rounding: bfloat16 logits between 16 and 32 lie 1/8 apart, and each is the end of many
# rounded sums. Garbage is not as good: it differs at the first or second token by many times that.
_AS_GOOD, _LOOKED_AT = 0.5, 5

_Server = TypeVar("_Server", bound=Running)
_Open = Callable[[], AbstractContextManager[_Server]]


@contextmanager
def guarded(canary: Path, plain: _Open[_Server], capturing: _Open[_Server]) -> Iterator[_Server]:
    """A capturing server that answers as the plain one did, which is opened once, where `canary` is missing.

    Raises ServerRefused where it answers otherwise, and what opening a server raises.
    """
    if not canary.is_file():
        with plain() as server:
            answers = [_record(server, prompt) for prompt in _PROMPTS]
        canary.parent.mkdir(parents=True, exist_ok=True)
        write_json(canary, answers)
    with capturing() as server:
        for recorded in json.loads(canary.read_text()):
            choice = _ask(server, recorded["prompt"], **WANTS_STATES)
            if (difference := _difference(recorded, choice["token_ids"])) is not None:
                raise ServerRefused(
                    f"the server that captures hidden states while it generates does not answer as a plain "
                    f"one: to {recorded['prompt']!r} {difference}. Nothing was recorded. Set "
                    "extraction.while_generating to false: then a second server captures them. If the plain "
                    f"server itself changed since, delete {canary}."
                )
        yield server


def _record(server: Running, prompt: str) -> dict[str, Any]:
    choice = _ask(server, prompt, logprobs=True, top_logprobs=_LOOKED_AT, return_tokens_as_token_ids=True)
    steps = (choice.get("logprobs") or {}).get("content") or []
    return {
        "prompt": prompt,
        "token_ids": choice["token_ids"],
        "as_good": [_as_good(step["top_logprobs"]) for step in steps],
    }


def _as_good(candidates: list[dict[str, Any]]) -> list[int]:
    best = max((one["logprob"] for one in candidates), default=0.0)
    # `token_id:42`
    return [int(one["token"].partition(":")[2]) for one in candidates if one["logprob"] >= best - _AS_GOOD]


def _difference(recorded: dict[str, Any], found: list[int]) -> str | None:
    """What differs beyond rounding, in words."""
    expected, as_good = recorded["token_ids"], dict(enumerate(recorded["as_good"]))
    for position, (wanted, token) in enumerate(zip(expected, found, strict=False)):
        if token != wanted:
            if token in as_good.get(position, ()):
                return None
            return f"it begins {found[: position + 3]}, expected {expected[: position + 3]} (token ids)"
    return None if len(found) == len(expected) else f"it gives {len(found)} tokens, expected {len(expected)}"


def _ask(server: Running, prompt: str, **also: Any) -> dict[str, Any]:
    """The choice of a greedy reply; one question at a time, so that nothing else is in its batch."""
    import httpx

    body = {"model": server.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    body |= {"max_completion_tokens": _TOKENS, "return_token_ids": True, **also}
    try:
        # The server is on this machine: a proxy in the environment is not meant.
        reply = httpx.post(
            f"{server.base_url}/v1/chat/completions", json=body, timeout=_LIMIT_S, trust_env=False
        )
    except httpx.TransportError as error:
        server.check_alive()
        raise ServerStalled(
            f"the server gave no reply to a short question ({error!r}). Read its log, then materialise "
            "synthetic_samples again."
        ) from error
    if reply.status_code != httpx.codes.OK:
        raise ServerRefused(
            f"HTTP {reply.status_code} to a short question, expected 200: {reply.text[:300]}. Read the "
            "server's log."
        )
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice
