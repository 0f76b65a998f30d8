"""Whether a job goes wrong from its first reply on, before hours of it are recorded.

Samples are held back until one of them shows that all is set up rightly: it is answered at all and,
where a reasoning parser is set, it has thoughts. If none of the first 16 replies has thoughts, or all
requests of the first round are refused, the job stops and leaves no sample behind that would have to be
deleted. Refusals come at once and replies after minutes: a few refused prompts say nothing yet.
"""

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.samples.sample import Sample

_ENOUGH_REPLIES = 16


class FirstReplies:
    """Holds samples back until the job is known to be right.

    `parser` is the server's reasoning parser, `slots` the number of requests that are out at once.
    """

    def __init__(self, parser: str | None, slots: int) -> None:
        self._parser = parser
        self._most_refused = max(_ENOUGH_REPLIES, slots)
        self._held: list[Sample] = []
        self._trusted = False
        self._failure: str | None = None

    def admit(self, sample: Sample) -> list[Sample]:
        """The samples that may be recorded now; raises QualityError when the first 16 all look wrong."""
        if self._trusted:
            return [sample]
        if self._failure:  # also if the job ended of something else at the same moment, and goes on
            raise QualityError(self._failure)
        self._held.append(sample)
        self._trusted = self._is_right(sample)
        if self._trusted:
            return self.rest()
        if failure := self._complaint():
            self._failure, self._held = failure, []
            raise QualityError(failure)
        return []

    def rest(self) -> list[Sample]:
        """The samples that are still held back; a job with fewer than 16 replies gets no verdict."""
        held, self._held = self._held, []
        return held

    def _is_right(self, sample: Sample) -> bool:
        return sample.verdict != "refused" and (self._parser is None or bool(sample.reasoning.strip()))

    def _complaint(self) -> str | None:
        refused = [sample for sample in self._held if sample.verdict == "refused"]
        replies = [sample for sample in self._held if sample.verdict != "refused"]
        if not replies and len(refused) >= self._most_refused:
            return (
                f"the server refused all of the first {len(refused)} requests: {refused[0].content}. None of "
                "this was recorded. Correct that and start again."
            )
        if len(replies) >= _ENOUGH_REPLIES:
            return (
                f"server.generation.reasoning_parser is {self._parser!r}, but {len(replies)} first "
                "replies carry no reasoning. Expected thoughts in `reasoning` or `reasoning_content`. None "
                "of them was recorded. Name the parser of this model, or remove the setting if it does not "
                f"think. One begins {replies[-1].content[:80]!r}."
            )
        return None
