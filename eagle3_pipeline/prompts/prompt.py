"""One prompt: what a user says, turn by turn. The assistant's turns are the target's to write."""

from dataclasses import asdict, dataclass
from typing import Any, Self

from eagle3_pipeline.provenance import fingerprint

_ID_LENGTH = 16  # 64 bits of SHA-256: among 25,000 prompts two share an id with probability 2e-11


@dataclass(frozen=True)
class Prompt:
    """The user turns of one conversation, and the system message if there is one."""

    prompt_id: str
    turns: tuple[str, ...]
    system: str | None
    source: str

    @classmethod
    def create(cls, turns: tuple[str, ...], *, system: str | None, source: str) -> Self:
        """A prompt whose id follows from its content alone: renaming its source changes no id."""
        return cls(fingerprint([system, list(turns)])[:_ID_LENGTH], turns, system, source)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """The prompt that `to_json` wrote."""
        return cls(record["prompt_id"], tuple(record["turns"]), record["system"], record["source"])

    def to_json(self) -> dict[str, Any]:
        """The prompt as JSON values."""
        return asdict(self) | {"turns": list(self.turns)}
