"""How near to a tie the target is where two greedy replies to one prompt part, by its own account.

    prompt    p0 p1 p2      one reply      c0 c1 c2 c3 ..
                            the other      c0 c1 x2 x3 ..
    asked     p0 p1 p2 c0 c1 and one token more: log p(c2) = -0.71, log p(x2) = -0.73, log p(y) = -4.1, ..
    gap       what the less likely of c2 and x2 is behind the likeliest of all: 0.02

Both replies are the same up to there, so one distribution judges both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from eagle3_pipeline.background import run_in_background
from eagle3_pipeline.errors import QualityError, ServerError
from eagle3_pipeline.evaluation.replies import Question, Round

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

Replies = Mapping[str, Sequence[int]]
"""Token ids of a reply by the name of its prompt."""
Place = tuple[str, int]
"""The name of a prompt, and the number of a token of its reply, from 0."""
Likeliest = Mapping[int, float]
"""Log-probabilities of the likeliest tokens at a place, at least one."""

# What vLLM tells at most, unless --max-logprobs says otherwise.
_LIKELIEST = 20
# No speed is measured here, so the number is one that any server takes at once.
_IN_FLIGHT = 16
_TEXT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Parting:
    """The first token in which two replies to one prompt differ."""

    name: str
    position: int
    """From 0."""
    tokens: tuple[int, int]

    @property
    def place(self) -> Place:
        """Where to ask."""
        return self.name, self.position

    def gap(self, likeliest: Likeliest) -> float:
        """How far the less likely of both tokens is behind the likeliest of all, in log-probability.

        A token that is not among `likeliest` is at least as far behind as the last of them: that far.
        """
        last = min(likeliest.values())
        return max(likeliest.values()) - min(likeliest.get(token, last) for token in self.tokens)


def partings(one: Replies, other: Replies, names: Iterable[str]) -> list[Parting]:
    """The first difference of each pair of replies that differ, in the order of `names`.

    Raises QualityError where a reply is the whole beginning of the other: no choice of a token does that.
    """
    found = []
    for name in names:
        pairs = enumerate(zip(one[name], other[name], strict=False))
        differing = next(((position, pair) for position, pair in pairs if pair[0] != pair[1]), None)
        if differing is not None:
            found.append(Parting(name, *differing))
        elif len(one[name]) != len(other[name]):
            raise QualityError(
                f"prompt {name}: one greedy reply has {len(one[name])} tokens, another {len(other[name])}, "
                "and the shorter is the beginning of the longer. Rounding may choose another token, but it "
                "ends no reply without one. Look for a limit in the servers' logs and in "
                "server.evaluation.extra_args."
            )
    return found


def ask_target(
    server: "RunningServer",
    prompts: Mapping[str, Sequence[int]],
    replies: Replies,
    places: Iterable[Place],
    *,
    request_timeout_s: float,
) -> dict[Place, Likeliest]:
    """The target's likeliest tokens at each place of `replies`, one short request for each.

    Raises ServerDied and ServerError.
    """
    questions = {
        (name, position): _question(name, position, [*prompts[name], *replies[name][:position]])
        for name, position in places
    }
    run = Round(server, "near ties", in_flight=_IN_FLIGHT, request_timeout_s=request_timeout_s)
    answers = run_in_background(lambda: run.answer(list(questions.values())))
    found = {}
    for place, question in questions.items():
        reply = answers.get(question.name)
        if reply is None or not reply.likeliest:
            raise ServerError(
                f"the server at {server.base_url} gave no log-probabilities for {question.name}, which tell "
                f"whether two greedy replies part at a near tie. It must give {_LIKELIEST}: take "
                f"--max-logprobs out of server.evaluation.extra_args, and see the server's log {server.log}."
            )
        found[place] = reply.likeliest
    return found


def _question(name: str, position: int, token_ids: list[int]) -> Question:
    body = {
        "prompt": token_ids,
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": _LIKELIEST,
        # Several tokens may have the same text, a half of a character for example.
        "return_tokens_as_token_ids": True,
    }
    return Question(f"{name}, token {position + 1}", "/v1/completions", body)


def described(server: "RunningServer", token: int) -> str:
    """A token for a message: its text, if the server tells it, and its id."""
    try:
        response = httpx.post(
            f"{server.base_url}/detokenize",
            json={"model": server.model, "tokens": [token]},
            timeout=_TEXT_TIMEOUT_S,
            trust_env=False,
        ).raise_for_status()
        return f"{response.json()['prompt']!r} (id {token})"
    except (httpx.HTTPError, ValueError, KeyError):
        return f"id {token}"  # the message that it is for says more than this failure
