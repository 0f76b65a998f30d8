"""One prompt at work: its user turns, asked one after the other on the target's own answers.

    system, user 0, [content 0], user 1, [content 1], ... user n

Only the content of an answer goes back into the conversation, never its thoughts, as chat templates
do it at serving time. A conversation ends early at an answer that has no text or that is a loop:
what a user says after it would answer something that was never said. A long one runs into the server's
context: vLLM gives a reply the room that is left, so that it ends truncated, and answers HTTP 400 when
there is none. That turn is a refused sample, and those after it are not asked.
"""

import itertools
from collections.abc import Container
from dataclasses import replace
from typing import Any

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.generation.reply import Reply
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.samples.sample import Sample, sample_id
from eagle3_pipeline.samples.screening import screen


class Conversation:
    """A prompt with the samples that it has so far."""

    def __init__(self, prompt: Prompt, *, is_greedy: bool = False) -> None:
        """`is_greedy`: its replies judge the draft, which is served greedily, so they are asked for so."""
        self.prompt = prompt
        self.is_greedy = is_greedy
        self.samples: list[Sample] = []
        self.was_asked = False
        """In this call: if its server died, it may be the prompt that kills it."""

    @property
    def sample_ids(self) -> list[str]:
        """Ids of the samples that it can have."""
        return [sample_id(self.prompt.prompt_id, turn) for turn in range(len(self.prompt.turns))]

    @property
    def next_id(self) -> str:
        """Id of the sample that is asked for next."""
        return sample_id(self.prompt.prompt_id, len(self.samples))

    @property
    def ended_early(self) -> bool:
        """Whether the last answer is none that one can go on from."""
        return bool(self.samples) and not _goes_on(self.samples[-1])

    @property
    def turns_left(self) -> int:
        """Turns that are still to be asked."""
        return 0 if self.ended_early else len(self.prompt.turns) - len(self.samples)

    def take_up(self, recorded: dict[str, Sample]) -> None:
        """Go on from samples that an earlier call recorded; raises DamagedFile on a gap in the turns."""
        found = [recorded[name] for name in self.sample_ids if name in recorded]
        if [one.turn for one in found] != list(range(len(found))):
            raise DamagedFile(
                f"prompt {self.prompt.prompt_id} has replies to the turns {[one.turn for one in found]}, "
                "expected all from 0 on. Move the journal of its shard away to ask again."
            )
        self.samples = found

    def messages(self) -> list[dict[str, str]]:
        """The conversation up to the next user turn, in the shape of a chat request."""
        system = [{"role": "system", "content": self.prompt.system}] if self.prompt.system is not None else []
        said: list[dict[str, str]] = []
        for turn, one in zip(self.prompt.turns, self.samples, strict=False):
            said += [{"role": "user", "content": turn}, {"role": "assistant", "content": one.content}]
        return [*system, *said, {"role": "user", "content": self.prompt.turns[len(self.samples)]}]

    def add_reply(self, reply: Reply, sampling: dict[str, Any], server: str) -> Sample:
        """Take the reply to the next turn as a sample, with its verdict."""
        verdict = screen(reply.completion_token_ids, reply.finish_reason, reply.content, reply.reasoning)
        return self._add(
            Sample(
                sample_id=self.next_id,
                prompt_id=self.prompt.prompt_id,
                turn=len(self.samples),
                prompt_token_ids=reply.prompt_token_ids,
                completion_token_ids=reply.completion_token_ids,
                finish_reason=reply.finish_reason,
                content=reply.content,
                reasoning=reply.reasoning,
                usage=reply.usage,
                sampling=sampling,
                server=server,
                verdict=verdict,
            )
        )

    def add_refusal(self, message: str, sampling: dict[str, Any], server: str) -> Sample:
        """Take the server's refusal of the next turn as a sample that trains nothing."""
        return self._add(
            Sample(
                sample_id=self.next_id,
                prompt_id=self.prompt.prompt_id,
                turn=len(self.samples),
                prompt_token_ids=[],
                completion_token_ids=[],
                finish_reason="refused",
                content=message,
                reasoning="",
                usage={},
                sampling=sampling,
                server=server,
                verdict="refused",
            )
        )

    def forget(self, turn: int) -> None:
        """Keep of a recorded sample verdict and content, and the contents until the last turn is recorded."""
        self.samples[turn] = replace(
            self.samples[turn], prompt_token_ids=[], completion_token_ids=[], reasoning=""
        )
        if self.turns_left == 0 and turn == len(self.samples) - 1:
            self.samples = [replace(one, content="") for one in self.samples]

    def keep_only(self, recorded: Container[str]) -> None:
        """Take back the samples from the first on that is not among the recorded."""
        kept = itertools.takewhile(lambda sample: sample.sample_id in recorded, self.samples)
        self.samples = list(kept)

    def _add(self, sample: Sample) -> Sample:
        self.samples.append(sample)
        return sample


def _goes_on(sample: Sample) -> bool:
    return sample.verdict in ("good", "truncated") and bool(sample.content.strip())
