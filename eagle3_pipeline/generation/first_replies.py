"""Whether a job goes wrong from its first reply on, before hours of it are recorded.

Samples are held back until one of them shows that all is set up rightly: it is answered at all and,
where a reasoning parser is set, it has thoughts. If none of the first 16 does, the job stops and
leaves no sample behind that would have to be deleted.
"""

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.samples.sample import Sample

_ENOUGH_REPLIES = 16


class FirstReplies:
    """Holds samples back until the job is known to be right; `parser` is the server's reasoning parser."""

    def __init__(self, parser: str | None) -> None:
        self._parser = parser
        self._held: list[Sample] = []
        self._trusted = False
        self._failed = False

    def admit(self, sample: Sample) -> list[Sample]:
        """The samples that may be recorded now; raises QualityError when the first 16 all look wrong."""
        if self._trusted:
            return [sample]
        if self._failed:
            return []  # a reply that comes in while the job is being stopped
        self._held.append(sample)
        self._trusted = self._is_right(sample)
        if not self._trusted and len(self._held) >= _ENOUGH_REPLIES:
            self._failed = True
            held = self.rest()
            raise QualityError(self._complaint(held))
        return self.rest() if self._trusted else []

    def rest(self) -> list[Sample]:
        """The samples that are still held back; a job with fewer than 16 replies gets no verdict."""
        held, self._held = self._held, []
        return held

    def _is_right(self, sample: Sample) -> bool:
        return sample.verdict != "refused" and (self._parser is None or bool(sample.reasoning.strip()))

    def _complaint(self, held: list[Sample]) -> str:
        refused = [sample for sample in held if sample.verdict == "refused"]
        if len(refused) == len(held):
            return (
                f"the server refused all of the first {len(held)} requests with HTTP 400: "
                f"{refused[0].content}. Nothing was recorded. Correct that and start again."
            )
        return (
            f"server.generation.reasoning_parser is {self._parser!r}, but {len(held)} first replies carry no "
            f"reasoning ({len(refused)} of them were refused). Expected thoughts in `reasoning` or "
            "`reasoning_content`. Nothing was recorded. Name the parser of this model, or remove the "
            f"setting if it does not think. One reply begins {held[-1].content[:80]!r}."
        )
