"""Is the draft served as training judged it? Simulated and served acceptance of the same conversations.

Of each side only the positions that both have are compared; K of them give the length 1 + sum of the first K:

    simulated    0.50  0.30  0.10          length 1.90
    served       0.49  0.30  0.10          length 1.89      ratio 0.995: they agree

A proposal of a wrong function (norms, rope, layers) is a worse one, so a difference means that the server
runs another draft, or another target, than training had.
"""

from collections.abc import Mapping
from typing import Any

from eagle3_pipeline.evaluation.replay import Replay
from eagle3_pipeline.recipe.settings import Evaluation

TOLERANCE = 0.03
"""Relative difference of the lengths up to which they agree."""
# Tokens behind the end of replies are told from this share of the served length on.
_TOLD_BEHIND_THE_END = 0.01


def compare(replay: Replay | None, trained: Mapping[str, Any], settings: Evaluation) -> dict[str, Any]:
    """The facts on the agreement; `trained` are those of draft_checkpoint.

    `simulation_agrees` and `simulation_ratio` (served / simulated length) are None where nothing was served.
    """
    facts: dict[str, Any] = {
        "simulated_acceptance_length": trained["simulated_acceptance_length"],
        "simulation_agrees": None,
        "simulation_ratio": None,
        "simulation": None,
    }
    if replay is None:
        return facts
    facts["simulation"] = {
        "judges": trained.get("judges"),
        "served": replay.served,
        "refused": replay.refused,
        "test_time_steps": len(trained["simulated_acceptance_by_position"]),
        "speculative_tokens": settings.speculative_tokens,
        "temperature": settings.temperature,
    }
    if replay.acceptance is None:
        return facts
    pairs = zip(
        trained["simulated_acceptance_by_position"], replay.acceptance.acceptance_by_position, strict=False
    )
    simulated, served = map(list, zip(*pairs, strict=True))
    ratio = (1 + sum(served)) / (1 + sum(simulated))
    facts["simulation_agrees"] = abs(ratio - 1) <= TOLERANCE
    facts["simulation_ratio"] = ratio
    facts["simulation"] |= {
        "same_share": replay.same / replay.served,
        "drafts": replay.acceptance.drafts,
        "behind_the_end": replay.behind_the_end,
        "simulated_length": 1 + sum(simulated),
        "served_length": 1 + sum(served),
        "simulated_by_position": simulated,
        "served_by_position": served,
    }
    return facts


def rows_of_comparison(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """Simulated, served and their ratio, a row each; none where nothing was compared."""
    if report["simulation_agrees"] is None:
        return []
    found = report["simulation"]
    sides = {
        side: [found[f"{side}_length"], *found[f"{side}_by_position"]] for side in ("simulated", "served")
    }
    cells = {side: [f"{value:.3f}" for value in values] for side, values in sides.items()}
    cells["ratio"] = [
        f"{served / simulated:.3f}" if simulated else "-"
        for simulated, served in zip(sides["simulated"], sides["served"], strict=True)
    ]
    names = ["length", *(f"pos {k}" for k in range(1, len(cells["ratio"])))]
    return [{"acceptance": side, **dict(zip(names, values, strict=True))} for side, values in cells.items()]


def explanation(report: Mapping[str, Any]) -> str:
    """What was compared and what came out; where they do not agree, what that means and what to look at."""
    found = report["simulation"]
    if found is None:
        return "Simulated and served acceptance are not compared: no conversation judged the draft."
    if report["simulation_agrees"] is None:
        return (
            f"Simulated and served acceptance are not compared: the server refused all {found['refused']} "
            "conversations that judged the draft. Raise server.evaluation.max_model_len."
        )
    text = (
        f"On {found['served']} conversations that judged the draft in training: acceptance length "
        f"{found['simulated_length']:.3f} simulated, {found['served_length']:.3f} served over "
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
            f"Training simulates {steps} tokens a draft, the server proposes {tokens}: the first "
            f"{min(steps, tokens)} positions are compared, and since the two walks stop at other tokens, a "
            "small difference is no fault."
        )
    if found["refused"]:
        notes.append(f"{found['refused']} more are longer than the server's context: left out.")
    behind = found["behind_the_end"]
    if behind / found["drafts"] > _TOLD_BEHIND_THE_END * found["served_length"]:
        notes.append(
            f"Up to {behind} of the tokens that the server accepted lie behind the end of a reply, where the "
            "simulation stops."
        )
    judges = found["judges"]
    if judges is not None and judges != found["served"] + found["refused"]:
        notes.append(f"Training judged by {judges}: the others had no usable states.")
    return "".join(f"{note} " for note in notes)
