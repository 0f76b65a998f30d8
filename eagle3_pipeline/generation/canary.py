"""A canary for the server that captures while it generates: does it still say what a plain server says?

On such a server each step also verifies a token that the capture proposes. When sampling, vLLM then gives
one token over and over, with HTTP 200 and states that look well; a draft learns nothing from that. Greedily
it is right with the versions that were tried. So the same few prompts are answered by a plain server once,
and by the capturing one at each opening, before anything is recorded. The states that come with these answers
were captured token by token; the same ids are then read as one prompt, whose states must be the same.

    canary/<fingerprint of the plain server>.json      prompts, its token ids, and what was as good as each
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from eagle3_pipeline.durable_files import write_json
from eagle3_pipeline.errors import ServerRefused, ServerStalled
from eagle3_pipeline.generation.captured_states import WANTS_STATES
from eagle3_pipeline.generation.life import Running
from eagle3_pipeline.staging import WriteFailed, staging_folder, wait_for_file

if TYPE_CHECKING:
    import torch

    _States = dict[str, torch.Tensor]

_PROMPTS = (
    "Name the planets of the solar system, from the sun outwards.",
    "Write a Python function that reverses a list in place.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Explain step by step.",
    "Tell a short story about a lighthouse keeper and a seagull.",
)
_TOKENS = 24
_LIMIT_S = 300.0
_FILE_S = 60.0  # from a reply to its file
_WAY_OUT = (
    "Nothing was recorded. Set extraction.while_generating to false: then a second server captures them."
)
# Two servers round differently: the capturing one computes two positions of a request in each step. What
# follows another token is another text, so the comparison of a prompt ends there, and the token must have
# been as good within rounding: bfloat16 logits between 16 and 32 lie 1/8 apart, and each is the end of many
# rounded sums. Garbage is not as good: it differs at the first or second token by many times that.
_AS_GOOD, _LOOKED_AT = 0.5, 5

_Server = TypeVar("_Server", bound=Running)
_Open = Callable[[], AbstractContextManager[_Server]]


@contextmanager
def guarded(
    canary: Path, staging: Path, plain: _Open[_Server], capturing: _Open[_Server]
) -> Iterator[_Server]:
    """A capturing server that answers as the plain one did, which is opened once, where `canary` is missing.

    `staging` is where the capturing server leaves its files. Raises ServerRefused where it answers otherwise
    or captures other states while it generates, Busy where another process captures, and what opening a
    server raises.
    """
    if not canary.is_file():
        with plain() as server:
            answers = [_record(server, prompt) for prompt in _PROMPTS]
        canary.parent.mkdir(parents=True, exist_ok=True)
        write_json(canary, answers)
    with capturing() as server:
        with staging_folder(staging):
            for recorded in json.loads(canary.read_text()):
                _compare(server, recorded, canary)
        yield server


def _compare(server: Running, recorded: dict[str, Any], canary: Path) -> None:
    reply = _ask(server, recorded["prompt"], **WANTS_STATES)
    token_ids = reply["choices"][0]["token_ids"]
    if (found := _difference(recorded, token_ids)) is not None:
        raise ServerRefused(
            f"the server that captures hidden states while it generates does not answer as a plain one: to "
            f"{recorded['prompt']!r} {found}. {_WAY_OUT} If the plain server itself changed since, delete "
            f"{canary}."
        )
    # The last token of a reply is never read, so it has no states.
    read = [*reply["prompt_token_ids"], *token_ids][:-1]
    body = {"model": server.model, "prompt": read, "max_tokens": 1, "temperature": 0}
    again = _post(server, "completions", body)
    if (found := _difference_of_states(_states(reply), _states(again), read)) is not None:
        raise ServerRefused(
            "the server that captures hidden states while it generates does not capture those of a prompt of "
            f"the same tokens: after {recorded['prompt']!r} {found}. {_WAY_OUT}"
        )


def _record(server: Running, prompt: str) -> dict[str, Any]:
    also = {"logprobs": True, "top_logprobs": _LOOKED_AT, "return_tokens_as_token_ids": True}
    choice = _ask(server, prompt, **also)["choices"][0]
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


def _difference_of_states(first: "_States", second: "_States", read: list[int]) -> str | None:
    from eagle3_pipeline.likeness import difference

    if not (first["token_ids"].tolist() == second["token_ids"].tolist() == read):
        return f"the files are of {len(first['token_ids'])} and {len(second['token_ids'])} other tokens"
    return difference(first["hidden_states"], second["hidden_states"])


def _states(reply: dict[str, Any]) -> "_States":
    """The tensors of the file that a reply names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        path = Path(reply["kv_transfer_params"]["hidden_states_path"])
        asyncio.run(wait_for_file(path, _FILE_S))
        return load_file(path)
    except (KeyError, TypeError, WriteFailed, TimeoutError, OSError, SafetensorError) as error:
        raise ServerRefused(
            f"the server that captures hidden states while it generates left none that can be read "
            f"({error!r}). {_WAY_OUT}"
        ) from error


def _ask(server: Running, prompt: str, **also: Any) -> dict[str, Any]:
    """A greedy reply; one question at a time, so that nothing else is in its batch."""
    body = {"model": server.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    body |= {"max_completion_tokens": _TOKENS, "return_token_ids": True, **also}
    return _post(server, "chat/completions", body)


def _post(server: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    import httpx

    try:
        # The server is on this machine: a proxy in the environment is not meant.
        reply = httpx.post(f"{server.base_url}/v1/{path}", json=body, timeout=_LIMIT_S, trust_env=False)
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
    answer: dict[str, Any] = reply.json()
    return answer
