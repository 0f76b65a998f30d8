"""From a row to a prompt, or to the reason why it gives none. Every row gets exactly one of the two."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from eagle3_pipeline.prompts.held_out import HeldOut
from eagle3_pipeline.prompts.near_duplicates import NearDuplicates, plain, shingles
from eagle3_pipeline.prompts.parsing import ParsedPrompt, Reason, RowRejected, parse
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.prompts.sources import Row


@dataclass(frozen=True)
class Rejection:
    """A row that gives no prompt: where it stands, the reason that is counted, a detail for people."""

    where: str
    reason: Reason
    detail: str

    def to_json(self) -> dict[str, str]:
        """The rejection as JSON values."""
        return asdict(self)


class Screening:
    """Judges rows one after the other; of two similar prompts the earlier one stays.

    A verdict depends on the rows before it only, so the prompts kept of fewer rows are a prefix of
    those kept of more.
    """

    def __init__(
        self,
        *,
        tokens_of: Callable[[ParsedPrompt], int],
        max_prompt_tokens: int,
        near_duplicate_similarity: float,
        held_out: Iterable[Prompt] = (),
    ) -> None:
        """`tokens_of` counts the tokens of a parsed row, see ChatLength; rows near `held_out` are refused."""
        self._tokens_of = tokens_of
        self._max_prompt_tokens = max_prompt_tokens
        self._texts: dict[tuple[str, ...], str] = {}
        self._kept = NearDuplicates(near_duplicate_similarity)
        self._held_out = HeldOut(held_out, near_duplicate_similarity)

    def judge(self, row: Row) -> Prompt | Rejection:
        """The prompt of a row, remembered for the rows to come, or why there is none."""
        try:
            parsed = parse(row.value, row.column)
            self._check_length(parsed)
            sets = [shingles(turn) for turn in parsed.turns]
            self._held_out.check(parsed, sets)
            self._check_duplicates(parsed, sets, row)
        except RowRejected as rejected:
            return Rejection(row.where, rejected.reason, rejected.detail)
        return Prompt.create(parsed.turns, system=parsed.system, source=row.source)

    def _check_length(self, parsed: ParsedPrompt) -> None:
        tokens = self._tokens_of(parsed)
        if tokens > self._max_prompt_tokens:
            bound = self._max_prompt_tokens
            raise RowRejected("too_long", f"{tokens} tokens, prompts.max_prompt_tokens is {bound}")

    def _check_duplicates(self, parsed: ParsedPrompt, sets: list[frozenset[int]], row: Row) -> None:
        texts = tuple(plain(turn) for turn in parsed.turns)
        if texts in self._texts:
            raise RowRejected("duplicate", f"same as {self._texts[texts]}")
        # Without the system message: a long one, the same in all rows, would make all of them similar.
        elements = frozenset().union(*sets)
        if (found := self._kept.find(elements)) is not None:
            raise RowRejected("near_duplicate", f"similarity {found[1]:.2f} to {found[0]}")
        self._texts[texts] = row.where
        self._kept.add(row.where, elements)
