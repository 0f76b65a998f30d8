"""A finding of the doctor: what was found, what was expected, what to do."""

from dataclasses import dataclass
from enum import StrEnum
from textwrap import indent

_WIDTH = 9


class Mark(StrEnum):
    """How much a finding matters: not at all, worth knowing, or in the way."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One finding; as a string it is the mark, what was found, and below it what to do."""

    mark: Mark
    what: str
    """What was found and, where that is not plain, what was expected."""
    advice: str = ""
    """What to do; empty where nothing has to be done."""

    def __str__(self) -> str:
        text = f"{self.what}\n→ {self.advice}" if self.advice else self.what
        return f"{self.mark:<{_WIDTH}}{indent(text, ' ' * _WIDTH).lstrip()}"


def ok(what: str) -> Finding:
    """As it should be."""
    return Finding(Mark.OK, what)


def note(what: str, advice: str = "") -> Finding:
    """Worth knowing, and in nobody's way."""
    return Finding(Mark.NOTE, what, advice)


def problem(what: str, advice: str = "") -> Finding:
    """Something will fail of this."""
    return Finding(Mark.PROBLEM, what, advice)
