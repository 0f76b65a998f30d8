"""Settings of the generation: how the target answers, and what of its answers is tolerated."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from eagle3_pipeline.recipe.strict import Share, Strict

# Of a request without a limit of its own: time in the server's queue and prefill, then of each token. A slow
# but healthy server makes 10 to 50 tokens a second for each of many requests.
_QUEUE_S = 300.0
_SLOWEST_TOKEN_S = 0.25
# vLLM takes 256 sequences at once by default, 1,024 on the largest GPUs: more of them only queue.
_MOST_IN_FLIGHT = 1024


class LengthBounds(Strict):
    """Least and most tokens at percentiles of the completion lengths; what is left out has no bounds."""

    p10: tuple[int, int] | None = Field(default=None, strict=False)
    """Bounds of the length that a tenth of the completions stays below."""
    p50: tuple[int, int] | None = Field(default=None, strict=False)
    """Bounds of the median length."""
    p90: tuple[int, int] | None = Field(default=None, strict=False)
    """Bounds of the length that a tenth of the completions exceeds."""

    @model_validator(mode="after")
    def _rising(self) -> Self:
        for name in type(self).model_fields:
            bounds = getattr(self, name)
            if bounds is not None and not 0 <= bounds[0] <= bounds[1]:
                raise ValueError(f"{name} is {list(bounds)}, expected [least, most] in tokens")
        return self


class Generation(Strict):
    """How the target answers the prompts."""

    concurrency: PositiveInt | Literal["auto"] = 64
    """Requests at the server at the same time; `auto` finds the number by the server's throughput."""
    max_completion_tokens: PositiveInt = 512
    """Longest completion; longer ones are truncated samples."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.7
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling bound."""
    top_k: int = -1
    """Sample among the k most probable tokens; -1 is off."""
    request_timeout_s: PositiveFloat | None = None
    """Limit of one request from its sending to its last byte. By default 300 s, and 0.25 s for each token
    that it may take."""
    server_restarts: NonNegativeInt = 5
    """How often in one step a server that dies while it answers, or leaves requests without a reply, is
    followed by another one; never after two in a row that added no reply."""
    max_truncated_share: Share = 0.5
    """More truncated samples than this fail `sample_audit`."""
    max_rejected_share: Share = 0.1
    """More rejected (empty, degenerate, refused) samples than this fail `sample_audit`."""
    max_degenerate_share: Share = 0.1
    """More degenerate samples (loops) than this fail `sample_audit`."""
    completion_lengths: LengthBounds = LengthBounds()
    """Bounds of the distribution of completion lengths, outside of which `sample_audit` fails."""
    train_truncated: bool = True
    """Whether truncated samples train the draft."""

    @property
    def most_in_flight(self) -> int:
        """Requests that may ever be at the server at the same time."""
        return _MOST_IN_FLIGHT if self.concurrency == "auto" else self.concurrency

    def request_limit_s(self, tokens: int) -> float:
        """Seconds that a request for `tokens` tokens may take: four tokens a second, after the queue."""
        return self.request_timeout_s or _QUEUE_S + tokens * _SLOWEST_TOKEN_S
