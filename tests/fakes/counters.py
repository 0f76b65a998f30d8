"""What vLLM counts, and its /metrics text: a recorded one with this server's names and numbers put in."""

import random
import re
from collections import defaultdict
from pathlib import Path

_RECORDED = Path(__file__).parent / "recorded"
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")


class Counters:
    """Requests and tokens by engine; requests go to the engines in turn."""

    def __init__(self, served_name: str, engines: int, speculative_tokens: int, *, with_draft: bool) -> None:
        self._served_name = served_name
        self._engines = engines
        self.speculative_tokens = speculative_tokens
        source = "metrics_speculation_fresh.txt" if with_draft else "metrics_fresh.txt"
        self._template = [_parsed(line) for line in (_RECORDED / source).read_text().splitlines()]
        self._values: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(engines)]
        self._next_engine = 0

    def take_engine(self) -> int:
        """The engine of the next request."""
        engine = self._next_engine
        self._next_engine = (engine + 1) % self._engines
        return engine

    def add(self, engine: int, name: str, amount: float = 1, **labels: str) -> None:
        """Count up (or down, for gauges) the metric `name`, without its `vllm:`."""
        self._values[engine][_key(name, labels)] += amount

    def put(self, engine: int, name: str, value: float) -> None:
        """Set the gauge or the sum `name` of an engine."""
        self._values[engine][name] = value

    def speculate(self, engine: int, tokens: int, acceptance: float, seed: int) -> int:
        """Count the drafts of a completion of `tokens` tokens; returns the number of steps that it took.

        A step gives the tokens of the draft up to the first rejected one, and one token of the target's.
        """
        chance = random.Random(seed)
        left, steps = tokens - 1, 1  # the first token comes from the prefill
        while left > 0:
            accepted = 0
            while accepted < self.speculative_tokens and chance.random() < acceptance:
                self.add(engine, "spec_decode_num_accepted_tokens_per_pos_total", position=str(accepted))
                accepted += 1
            self.add(engine, "spec_decode_num_drafts_total")
            self.add(engine, "spec_decode_num_draft_tokens_total", self.speculative_tokens)
            self.add(engine, "spec_decode_num_accepted_tokens_total", accepted)
            left -= accepted + 1
            steps += 1
        return steps

    def text(self) -> str:
        """The answer of /metrics."""
        lines: list[str] = []
        for one in self._template:
            if isinstance(one, str):
                lines.append(one)
                continue
            name, labels, value = one
            if "model_name" in labels:
                labels["model_name"] = self._served_name
            if "position" not in labels:
                lines += self._by_engine(name, labels, value)
            elif labels["position"] == "0":  # the recorded positions become as many as this server has
                for position in range(self.speculative_tokens):
                    lines += self._by_engine(name, {**labels, "position": str(position)}, value)
        return "\n".join(lines) + "\n"

    def _by_engine(self, name: str, labels: dict[str, str], recorded: str) -> list[str]:
        own = {key: value for key, value in labels.items() if key not in ("engine", "model_name")}
        lines = []
        for engine in range(self._engines):
            counted = self._values[engine].get(_key(name.removeprefix("vllm:"), own))
            value = recorded if counted is None else repr(float(counted))
            given = ",".join(f'{key}="{text}"' for key, text in {**labels, "engine": str(engine)}.items())
            lines.append(f"{name}{{{given}}} {value}")
        return lines


def _parsed(line: str) -> str | tuple[str, dict[str, str], str]:
    """Name, labels and value of a sample of an engine's; any other line as it is."""
    found = _SAMPLE.match(line)
    if found is None or 'engine="' not in (found["labels"] or ""):
        return line
    labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', found["labels"]))
    return found["name"], labels, found["value"]


def _key(name: str, labels: dict[str, str]) -> str:
    return name + "".join(f",{key}={labels[key]}" for key in sorted(labels))
