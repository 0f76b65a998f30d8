"""What a report takes, before it is made: servers to start, and what each is asked.

    the draft        one server for each number of speculative tokens; the first answers the conversations
                     that judged as well (replay.py)
    the base draft   where there is one
    the target       alone
    the release      the first set once more, with the folder that is to be released (release/smoke.py)

Warm-ups and questions about single tokens are left out: they take seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from eagle3_pipeline.evaluation.grid import Times, of_base, of_draft, of_target, token_counts
from eagle3_pipeline.recipe.settings import Recipe

# What replay.py has in flight.
_JUDGED_IN_FLIGHT = 16


@dataclass(frozen=True)
class Asked:
    """The replies to one set, some of them at a time, or several times over."""

    replies: int
    tokens: float
    """Expected, of all replies."""
    in_flight: int


@dataclass(frozen=True)
class Effort:
    """Servers by name, with what each is asked."""

    servers: Mapping[str, list[Asked]]

    @property
    def asked(self) -> list[Asked]:
        """Of all servers together."""
        return [one for asked in self.servers.values() for one in asked]

    @property
    def replies(self) -> int:
        """Their number."""
        return sum(one.replies for one in self.asked)

    @property
    def tokens(self) -> float:
        """Expected, of all replies."""
        return sum(one.tokens for one in self.asked)

    def seconds(self, pace: float) -> float:
        """How long the replies take where each request in flight makes `pace` tokens a second."""
        return sum(one.tokens / (pace * one.in_flight) for one in self.asked)


def effort_of_report(recipe: Recipe, prompts: Mapping[str, int], reply: float, judged: float) -> Effort:
    """What the report asks; `prompts` has the number of each set's.

    `reply` and `judged` are the expected tokens of a reply in it, and of one that judges the draft.
    """
    settings = recipe.evaluation

    def measured(times: Times) -> list[Asked]:
        return [
            _asked(count, reply, cell.in_flight, repeats)
            for cell, repeats in times.items()
            for count in prompts.values()
        ]

    headline, *further = token_counts(settings)
    servers = {_draft(headline): measured(of_draft(settings, headline))}
    servers[_draft(headline)].append(_asked(recipe.prompts.validation_prompts, judged, _JUDGED_IN_FLIGHT))
    servers |= {_draft(tokens): measured(of_draft(settings, tokens)) for tokens in further}
    if recipe.base_draft is not None:
        servers["the base draft"] = measured(of_base(settings))
    return Effort({**servers, "the target alone": measured(of_target(settings))})


def effort_of_release(recipe: Recipe, prompts: Mapping[str, int], reply: float) -> Effort:
    """What the smoke test of the released folder asks."""
    settings = recipe.evaluation
    return Effort(
        {"the released folder": [_asked(prompts[settings.sets[0].name], reply, settings.concurrency)]}
    )


def _asked(prompts: int, reply: float, in_flight: int, repeats: int = 1) -> Asked:
    return Asked(repeats * prompts, repeats * prompts * reply, min(in_flight, prompts))


def _draft(speculative_tokens: int) -> str:
    return f"the draft with speculative_tokens {speculative_tokens}"
