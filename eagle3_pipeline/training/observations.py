"""Which events of a training are shown while it works, and in which numbers: at most a hundred in all.

    one training       all epochs, and steps thinned out evenly over the planned ones with what is left
    alternatives       the hundred is shared among them; each ends with a line of its own

Dagster plots the latest hundred observations of an asset: more would push the first ones out.
"""

from typing import Any

from eagle3_pipeline.training.events import JUDGEMENTS, MARK, describe

MOST = 100
# Of each training: the judgement before the first step, and the line at the end of an alternative.
_OTHERS = 2


class Observations:
    """The events of one materialisation, chosen as they come."""

    def __init__(self, trainings: int = 1) -> None:
        """`trainings` will be heard one after the other."""
        self._left = MOST
        self._share = MOST // trainings
        self._steps = self._epochs = _Thinning(0, 1, 0)

    def of(self, event: dict[str, Any]) -> dict[str, float | str] | None:
        """What is to be shown of an event: its numbers, and a line for people. None: nothing."""
        if event[MARK] == "start":
            self._begin(event)
        if not self._left or not self._is_chosen(event):
            return None
        self._left -= 1
        return _numbers(event) | {"news": describe(event) or ""}

    def _begin(self, event: dict[str, Any]) -> None:
        most = max(self._share - _OTHERS, 0)
        epochs = min(event["epochs"], most)
        self._epochs = _Thinning(epochs, event["epochs"], 0)
        self._steps = _Thinning(most - epochs, event["steps"], event["step"])

    def _is_chosen(self, event: dict[str, Any]) -> bool:
        match event[MARK]:
            case "step":
                return self._steps.is_due(event["step"])
            case "epoch":
                return self._epochs.is_due(event["epoch"] + 1)
            case kind:
                return kind in ("start_judged", "alternative")


class _Thinning:
    """Takes at most `most` of the numbers up to `of`, evenly, from `done` on."""

    def __init__(self, most: int, of: int, done: int) -> None:
        self._most, self._of = most, max(of, 1)
        self._taken = self._place(done)

    def is_due(self, number: int) -> bool:
        place, before = self._place(number), self._taken
        self._taken = max(place, before)
        return place > before

    def _place(self, number: int) -> int:
        return self._most * number // self._of


def _numbers(event: dict[str, Any]) -> dict[str, float | str]:
    """The numbers that can be plotted; those of an alternative have its name before them."""
    of_held_out = "validation_" if event[MARK] in JUDGEMENTS else ""
    found = {
        "step": event.get("step", event.get("steps")),
        f"{of_held_out}loss": event.get("loss"),
        **{name: event.get(name) for name in ("acceptance_length", "tokens_per_second", "seconds_left")},
    }
    shares = event.get("accuracy") or event.get("accuracy_by_position") or ()
    found |= {f"{of_held_out}accuracy_{k}": share for k, share in enumerate(shares, 1)}
    prefix = f"{event['alternative']}/" if "alternative" in event else ""
    return {f"{prefix}{name}": float(value) for name, value in found.items() if value is not None}
