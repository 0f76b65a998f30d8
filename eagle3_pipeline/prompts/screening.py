"""From a row to a prompt, or to the reason why it gives none. Every row gets exactly one of the two.

The first prompts that are kept judge the draft; they are held out from all that come later.
"""

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
        validation: int = 0,
    ) -> None:
        """`tokens_of` counts the tokens of a parsed row, see ChatLength.

        Rows near `held_out`, of which the evaluation sends the first turn, are refused, and rows near any
        turn of the first `validation` prompts.
        """
        self._tokens_of = tokens_of
        self._max_prompt_tokens = max_prompt_tokens
        self._texts: dict[tuple[str, ...], str] = {}
        self._kept = NearDuplicates(near_duplicate_similarity)
        self._evaluation = HeldOut("near_evaluation", near_duplicate_similarity)
        for prompt in held_out:
            self._evaluation.add(f"one of {prompt.source}", prompt.turns[:1])
        self._validation = HeldOut("near_validation", near_duplicate_similarity)
        self._judges = validation

    def judge(self, row: Row) -> Prompt | Rejection:
        """The prompt of a row, remembered for the rows to come, or why there is none."""
        try:
            parsed = parse(row.value, row.column)
            self._check_length(parsed)
            sets = [shingles(turn) for turn in parsed.turns]
            self._evaluation.check(parsed, sets)
            self._check_duplicates(parsed, sets)
            if len(self._texts) >= self._judges:
                self._validation.check(parsed, sets)
        except RowRejected as rejected:
            return Rejection(row.where, rejected.reason, rejected.detail)
        self._remember(parsed, sets, row.where)
        return Prompt.create(parsed.turns, system=parsed.system, source=row.source)

    def _check_length(self, parsed: ParsedPrompt) -> None:
        tokens = self._tokens_of(parsed)
        if tokens > self._max_prompt_tokens:
            bound = self._max_prompt_tokens
            raise RowRejected("too_long", f"{tokens} tokens, prompts.max_prompt_tokens is {bound}")

    def _check_duplicates(self, parsed: ParsedPrompt, sets: list[frozenset[int]]) -> None:
        texts = _plain_turns(parsed)
        if texts in self._texts:
            raise RowRejected("duplicate", f"same as {self._texts[texts]}")
        if (found := self._kept.find(_of_all_turns(sets))) is not None:
            raise RowRejected("near_duplicate", f"similarity {found[1]:.2f} to {found[0]}")

    def _remember(self, parsed: ParsedPrompt, sets: list[frozenset[int]], where: str) -> None:
        if len(self._texts) < self._judges:
            self._validation.add(where, parsed.turns)
        self._texts[_plain_turns(parsed)] = where
        self._kept.add(where, _of_all_turns(sets))


def _plain_turns(parsed: ParsedPrompt) -> tuple[str, ...]:
    return tuple(plain(turn) for turn in parsed.turns)


def _of_all_turns(sets: list[frozenset[int]]) -> frozenset[int]:
    """Without the system message: a long one, the same in all rows, would make all of them similar."""
    return frozenset().union(*sets)
