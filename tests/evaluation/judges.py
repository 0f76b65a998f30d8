"""Samples of validation prompts, as the counting server answers them."""

from typing import Any

from eagle3_pipeline.samples import Sample


def judging(prompt_id: str, first: int, *, reply: int = 12, **changes: Any) -> Sample:
    """The first turn of a prompt: three prompt ids from `first`, and the server's reply of so many tokens."""
    prompt = [first, 5, 6]
    values: dict[str, Any] = {
        "sample_id": f"{prompt_id}-t0",
        "prompt_id": prompt_id,
        "turn": 0,
        "prompt_token_ids": prompt,
        "completion_token_ids": [sum(prompt) + k for k in range(reply)],
        "finish_reason": "stop",
        "content": "",
        "reasoning": "",
        "usage": {},
        "sampling": {"temperature": 0.0},
        "server": "s" * 64,
        "verdict": "good",
    }
    return Sample(**(values | changes))
