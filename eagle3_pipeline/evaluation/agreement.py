"""Is the draft served as training judged it? Simulated and served acceptance of the same conversations.

The simulation ends with the reply. vLLM counts the tokens that it accepts before it cuts the step off at the
reply's end (v1/core/sched/scheduler.py), so the served length is known as an interval; the shorter the
replies, the wider. K = 3, a reply of 7 tokens whose first comes from the prompt:

    tokens          . a b c d e f         both are right to the end and beyond
    simulated         3+1     2           5 of 2 drafts: length 3.5
    counted           3+1     3           6 of 2 drafts: length 4.0, with 2 tokens behind the end (one of
                                          them the target's own): the length is from 3.0 to 4.0

They agree where the simulated length is within 3 % of the interval. A proposal of a wrong function (norms,
rope, layers) is a worse one, so a difference means that the server runs another draft, or another target,
than training had.

A walk of fewer tokens starts again at other tokens. So the server's number of tokens is compared with the
simulation of exactly that number; of more tokens than training's steps there is none.
"""

from collections.abc import Mapping
from typing import Any

from eagle3_pipeline.evaluation.replay import Replay
from eagle3_pipeline.recipe.evaluation import Evaluation

TOLERANCE = 0.03
"""Relative difference up to which the simulated length agrees with the nearer end of what is served."""


def compare(replay: Replay | None, trained: Mapping[str, Any], settings: Evaluation) -> dict[str, Any]:
    """The facts on the agreement; `trained` are those of draft_checkpoint.

    `simulation_agrees` and `simulation_ratio` (served / simulated length) are None where nothing was served,
    and where more tokens are served than were simulated.
    """
    facts: dict[str, Any] = {
        "simulated_acceptance_length": trained["simulated_acceptance_length"],
        "simulation_agrees": None,
        "simulation_ratio": None,
        "simulation": None,
    }
    if replay is None:
        return facts
    facts["simulation"] = found = {
        "judges": trained.get("judges"),
        "served": replay.served,
        "refused": replay.refused,
        "test_time_steps": len(trained["simulated_acceptance_by_position"]),
        "speculative_tokens": settings.speculative_tokens,
        "temperature": settings.temperature,
    }
    if replay.acceptance is None:
        return facts
    served, drafts = replay.acceptance.acceptance_length, replay.acceptance.drafts
    at_least = served - replay.behind_the_end / drafts
    found |= {
        "same_share": replay.same / replay.served,
        "drafts": drafts,
        "behind_the_end": replay.behind_the_end,
        "served_length": served,
        "served_at_least": at_least,
        "served_by_position": list(replay.acceptance.acceptance_by_position),
    }
    found |= _simulated(trained, settings.speculative_tokens)
    if (simulated := found["simulated_length"]) is not None:
        facts["simulation_ratio"] = served / simulated
        facts["simulation_agrees"] = (
            at_least <= simulated * (1 + TOLERANCE) and simulated * (1 - TOLERANCE) <= served
        )
    return facts


def _simulated(trained: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """What training simulated for so many tokens a draft; its positions only for its own number of steps."""
    by_position = trained["simulated_acceptance_by_position"]
    if tokens == len(by_position):
        length = trained["simulated_acceptance_length"]
        return {"simulated_length": length, "simulated_by_position": by_position}
    lengths = trained["simulated_acceptance_by_tokens"] if tokens < len(by_position) else []
    return {"simulated_length": lengths[tokens - 1] if lengths else None, "simulated_by_position": []}


def rows_of_comparison(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """Simulated, served and their ratio, a row each; none where nothing was compared."""
    if report["simulation_agrees"] is None:
        return []
    found = report["simulation"]
    served = [found["served_length"], *found["served_by_position"]]
    simulated = [found["simulated_length"], *found["simulated_by_position"]]
    simulated += [None] * (len(served) - len(simulated))
    ratio = [one / other if other else None for one, other in zip(served, simulated, strict=True)]
    names = ["length", *(f"pos {k}" for k in range(1, len(served)))]
    rows = {"simulated": simulated, "served": served, "ratio": ratio}
    cells = {
        row: ["-" if value is None else f"{value:.3f}" for value in values] for row, values in rows.items()
    }
    cells["served"][0] = served_length(found)
    return [{"acceptance": row, **dict(zip(names, values, strict=True))} for row, values in cells.items()]


def served_length(found: Mapping[str, Any], digits: int = 3) -> str:
    """The served length of a report's `simulation`, with both ends where they differ in so many digits."""
    low, high = (f"{found[end]:.{digits}f}" for end in ("served_at_least", "served_length"))
    return high if low == high else f"{low} to {high}"


def explanation(report: Mapping[str, Any]) -> str:
    """What was compared and what came out; where they do not agree, what that means and what to look at."""
    found = report["simulation"]
    if found is None:
        return "Simulated and served acceptance are not compared: no conversation judged the draft."
    if not found["served"]:
        return (
            f"Simulated and served acceptance are not compared: the server refused all {found['refused']} "
            "conversations that judged the draft. Raise server.evaluation.max_model_len."
        )
    if report["simulation_agrees"] is None:
        steps, tokens = found["test_time_steps"], found["speculative_tokens"]
        return (
            f"Simulated and served acceptance are not compared: the server proposes {tokens} tokens a draft, "
            f"training simulated at most {steps}. On {found['served']} conversations that judged the draft "
            f"there the served acceptance length is {served_length(found)}. To compare, set "
            f"evaluation.speculative_tokens to at most {steps} or training.test_time_steps to {tokens}."
        )
    text = (
        f"On {found['served']} conversations that judged the draft in training: acceptance length "
        f"{found['simulated_length']:.3f} simulated, {served_length(found)} served over "
        f"{found['drafts']} drafts (ratio {report['simulation_ratio']:.3f}; {found['same_share']:.0%} of the "
        f"replies are the recorded ones). {_conditions(found)}"
    )
    if report["simulation_agrees"]:
        return f"{text}They agree within {TOLERANCE:.0%}."
    return (
        f"{text}They DISAGREE by more than {TOLERANCE:.0%}: the server does not run what training judged. If "
        "few replies are the recorded ones, the target answers otherwise: compare dtype, quantization and "
        "extra_args of server.generation and server.evaluation. Else the draft runs otherwise: look at norm "
        "flags, rope, attention window and layer ids in its config.json and at the version of vLLM, and "
        "measure again with --no-enable-prefix-caching in server.evaluation.extra_args."
    )


def _conditions(found: Mapping[str, Any]) -> str:
    """How the comparison is made where the settings of both sides differ, and what is left out of it."""
    notes = []
    if found["temperature"]:
        notes.append(f"Both are greedy, although evaluation.temperature is {found['temperature']:g}.")
    steps, tokens = found["test_time_steps"], found["speculative_tokens"]
    if steps != tokens:
        notes.append(
            f"The server proposes {tokens} tokens a draft, training {steps}: compared with the simulation of "
            f"{tokens}."
        )
    if found["refused"]:
        notes.append(f"{found['refused']} more are longer than the server's context: left out.")
    if served_length(found) != f"{found['served_length']:.3f}":
        notes.append(
            f"Up to {found['behind_the_end']} of the tokens that the server accepted lie behind the end of a "
            "reply, where the simulation stops: hence two ends."
        )
    judges = found["judges"]
    if judges is not None and judges != found["served"] + found["refused"]:
        notes.append(f"Training judged by {judges}: the others had no usable states.")
    return "".join(f"{note} " for note in notes)
