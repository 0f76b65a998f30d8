"""One sample: one reply of the target, as the token ids that its server returned.

    token_ids   p0 p1 p2 p3 | c0 c1 c2 <end>
    loss_mask    0  0  0  0 |  1  1  1  1

The ids are the truth (decoding and encoding again changes some); `content` and `reasoning` are for
people. A conversation of n user turns gives n samples, each with the conversation so far as its prompt.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from eagle3_pipeline.errors import DamagedFile

Verdict = Literal["good", "truncated", "empty", "degenerate", "refused"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
REJECTED: tuple[Verdict, ...] = ("empty", "degenerate", "refused")


def verdict_trains(verdict: str, train_truncated: bool) -> bool:
    """Whether the draft is trained on samples of this verdict."""
    return verdict == "good" or (verdict == "truncated" and train_truncated)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A reply to one user turn, and the verdict of its screening."""

    sample_id: str
    """`<prompt_id>-t<turn>`."""
    prompt_id: str
    """Hash of the prompt's content."""
    turn: int
    """Number of the user turn that this answers, from 0."""
    prompt_token_ids: list[int]
    """The rendered conversation up to and including the generation prompt; empty when refused."""
    completion_token_ids: list[int]
    """The reply with its closing end-of-turn id, where it has one."""
    finish_reason: str
    """`stop` or `length` as the server says it; `refused` when it takes no such request, or fails at it."""
    content: str
    """The answer as text; the server's message when refused."""
    reasoning: str
    """The thoughts as text, where a reasoning parser splits them off."""
    usage: dict[str, int]
    """What the server counted: `prompt_tokens`, `completion_tokens`, `total_tokens`; empty when refused."""
    sampling: dict[str, Any]
    """The sampling settings that were sent."""
    server: str
    """Fingerprint of the server that answered."""
    verdict: Verdict
    """`good`, `truncated`, `empty`, `degenerate` (a loop) or `refused`."""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and completion, `[tokens]`."""
        return self.prompt_token_ids + self.completion_token_ids

    @property
    def loss_mask(self) -> list[int]:
        """0 for each prompt id, 1 for each completion id, `[tokens]`."""
        return [0] * len(self.prompt_token_ids) + [1] * len(self.completion_token_ids)

    def trains(self, train_truncated: bool) -> bool:
        """Whether the draft is trained on this sample."""
        return verdict_trains(self.verdict, train_truncated)

    def to_record(self) -> dict[str, Any]:
        """The sample as JSON values."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """The sample of `to_record`; raises DamagedFile."""
        names = {one.name for one in fields(cls)}
        if record.keys() != names or record["verdict"] not in VERDICTS:
            raise DamagedFile(
                f"a sample with the fields {sorted(record)} and verdict {record.get('verdict')!r}, expected "
                f"{sorted(names)} and one of {list(VERDICTS)}. Another version wrote it: make it again."
            )
        return cls(**record)


def sample_id(prompt_id: str, turn: int) -> str:
    """Name of the reply to user turn `turn` (from 0) of a prompt."""
    return f"{prompt_id}-t{turn}"


def prompt_id_of(name: str) -> str:
    """The prompt that a sample id names."""
    return name.rsplit("-t", 1)[0]
