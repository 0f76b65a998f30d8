"""What a report on the tiny Llama has to say of served and simulated acceptance."""

from typing import Any

JUDGES = 12
"""Validation prompts: replies of some 25 tokens each are some 150 drafts, of which rounding may tip one."""
# The tiny Llama has a clear winner at each step, so its replies hardly ever part.
_SAME_SHARE = 0.9


def require_agreement(trained: dict[str, Any], report: dict[str, Any]) -> None:
    """Every conversation that judged was served as it was recorded, and the draft as it was simulated.

    Short replies are no excuse: what the server counts behind their ends is in the interval.
    """
    found = report["simulation"]
    assert trained["judges"] == found["judges"] == found["served"] + found["refused"]
    assert found["served"] > 0
    assert found["same_share"] >= _SAME_SHARE, found
    assert report["simulation_agrees"] is True, found
