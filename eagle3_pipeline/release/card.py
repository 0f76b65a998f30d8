"""The model card: README.md with the hub's front matter, for somebody who has only the released folder.

It follows from what the release is made of alone: neither its version nor where it is published stands in it.
"""

from collections import Counter
from typing import Any

import yaml

from eagle3_pipeline.alternatives import chosen
from eagle3_pipeline.evaluation.agreement import served_length
from eagle3_pipeline.evaluation.report import greedy_note, markdown, report_markdown_table, verdict
from eagle3_pipeline.evaluation.tables import rows_of_base, rows_of_grid
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe.prompts import PromptSource
from eagle3_pipeline.recipe.settings import Recipe
from eagle3_pipeline.release.commands import serve_line, sglang_line
from eagle3_pipeline.release.names import plain, public_name, target_name


def model_card(lineage: Lineage, name: str, provenance: dict[str, Any], without_eagle3: str | None) -> str:
    """README.md of the released folder called `name`; `provenance` is the content of provenance.json.

    `without_eagle3` is why the folder has no eagle3/, None where it has one. Raises MissingInput.
    """
    recipe = lineage.recipe
    report = lineage.acceptance_report().require().facts
    parts = [
        _front_matter(recipe),
        f"# {name}\n\nAn EAGLE-3 draft model: it lets a server answer with "
        f"**{target_name(recipe.target)}** in fewer steps, by proposing "
        f"{recipe.evaluation.speculative_tokens} tokens that the target then checks at once. The target "
        "decides on every token; without it this draft is of no use.",
        _serving(recipe, name, report, without_eagle3),
        _measured(report),
        f"## Trained on\n\n{_training(lineage)}",
        _licence(recipe),
        f"## Made by\n\n{_made_by(provenance)}",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(recipe: Recipe) -> str:
    values: dict[str, Any] = {
        "license": recipe.release.license,
        "library_name": "speculators",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "eagle3", "draft-model", "vllm", "sglang"],
    }
    if (base := public_name(recipe.target)) is not None:
        values["base_model"] = [base]
    if datasets := list(dict.fromkeys(one.dataset for one in recipe.prompts.sources if one.dataset)):
        values["datasets"] = datasets
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def _serving(recipe: Recipe, name: str, report: dict[str, Any], without_eagle3: str | None) -> str:
    parts = [
        f"## Serving\n\nPut this folder where you work, as `{name}`. From the Hugging Face Hub: "
        f"`hf download ID --local-dir {name}`, with `--revision v1` for a version that never changes. "
        "`sha256sum -c SHA256SUMS` in it checks the files.",
        f"vLLM (measured with {report['measured']['server']['vllm']}):\n\n"
        f"```bash\n{serve_line(recipe, f'./{name}')}\n```",
        "With the CPU wheel of vLLM, write `python -m vllm.entrypoints.openai.api_server --model` for "
        "`vllm serve`.",
    ]
    if without_eagle3 is None:
        parts.append(
            "SGLang, and SpecForge for further training, load the same weights from `eagle3` in it (the "
            f"numbers below are vLLM's):\n\n```bash\n{sglang_line(recipe, f'./{name}/eagle3')}\n```"
        )
    else:
        parts.append(f"There is no folder for SGLang and SpecForge, because {without_eagle3}.")
    if recipe.target.package is not None:
        parts.append(
            f"The target was taken from the GGUF file in the package `{recipe.target.package}`, expanded to "
            "bfloat16. Its weights were rounded by quantization, so acceptance with the original weights "
            "differs a little."
        )
    return "\n\n".join(parts)


def _measured(report: dict[str, Any]) -> str:
    parts = [
        f"## Measured\n\n{report_markdown_table(report)}",
        f"{verdict(report)} This machine is {_machine(report['measured']['machine'])}.",
    ]
    if report["base"] is not None:
        parts.append(f"Beside the draft that it started from:\n\n{markdown(rows_of_base(report))}")
    if len(report["grid"]) > 1:
        parts.append(f"With other settings:\n\n{markdown(rows_of_grid(report))}")
    parts.append(_conditions(report))
    if report["greedy"] is not None:
        parts.append(greedy_note(report["greedy"]))
    return "\n\n".join(part.rstrip("\n") for part in parts)


def _machine(machine: dict[str, Any]) -> str:
    if machine["gpus"]:
        return ", ".join(f"{count} x {name}" for name, count in Counter(machine["gpus"]).items())
    return f"{machine['processor']}, {machine['cores']} cores"


def _conditions(report: dict[str, Any]) -> str:
    text = (
        "`length` is the acceptance length, 1 + accepted tokens per draft, from the server's own counters "
        f"over {report['drafts']} drafts; `pos k` is the share of drafts whose k-th token was accepted; "
        f"speeds are medians over {report['repeats']} repeats, `spread` is the least and the most speed-up "
        "among them; `same` is the share of replies with identical tokens with and without the draft. "
        f"Temperature {report['temperature']:g}, {report['in_flight']} requests in flight, at most "
        f"{report['max_completion_tokens']} tokens a reply, held-out prompts."
    )
    if report["simulation_agrees"] is None:
        return text
    compared = report["simulation"]
    return (
        f"{text} On {compared['served']} conversations held out from training, answered greedily, the length "
        f"was {served_length(compared, 2)}; simulated in training: {compared['simulated_length']:.2f}."
    )


def _training(lineage: Lineage) -> str:
    recipe, trained = lineage.recipe, chosen(lineage).recipe.training
    samples, draft = lineage.sample_audit().require().facts, lineage.draft_checkpoint().require().facts
    generation, vocabulary = recipe.generation, chosen(lineage).vocabulary_map().require().facts
    target = lineage.target_model().require().facts
    early = " (it ended early, as it no longer got better)" if draft.get("stopped_early") else ""
    lines = [
        f"- prompts from {', '.join(_source_name(source) for source in recipe.prompts.sources)}",
        f"- {samples['samples']:,} replies to them by the target itself at temperature "
        f"{generation.temperature:g}, {samples['completion_tokens']:,} tokens; {samples['truncated']:,} of "
        f"them were cut at {generation.max_completion_tokens:,} tokens",
        f"- {draft['samples']:,} of these replies trained; {draft['judges']:,} others, at temperature 0, "
        "judged the draft and trained nothing",
        f"- hidden states of layers {', '.join(map(str, recipe.extraction.layers[:-1]))} (id k is what "
        "enters layer k)",
        f"- {draft['epochs']} epochs{early}, {draft['steps']:,} steps, {draft['tokens']:,} tokens, learning "
        f"rate {trained.learning_rate:g}, {trained.test_time_steps} test-time-training steps; the weights "
        f"are those of step {draft['best_step']:,}",
        f"- {draft['parameters']:,} trained parameters; {vocabulary['draft_tokens']:,} of the target's "
        f"{target['vocab_size']:,} tokens can be proposed",
    ]
    if recipe.base_draft is not None:
        base = recipe.base_draft
        lines.append(f"- starting from {base.hub_id or plain(base.path.name if base.path else '')}")
    return "\n".join(lines)


def _source_name(source: PromptSource) -> str:
    if source.dataset is None:
        return f"the file `{plain(source.path.name if source.path else '')}`"
    parts = ", ".join(plain(one) for one in (source.subset, source.split) if one)
    return f"`{source.dataset}` ({parts})"


def _licence(recipe: Recipe) -> str:
    return (
        f"## Licence\n\n`{recipe.release.license}`. This draft was trained on replies of "
        f"{target_name(recipe.target)}: its licence, and those of the prompts, bind it as well."
    )


def _made_by(provenance: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    rows = [
        {"thing": asset, "made from": f"`{made['fingerprint'][:12]}`", "content": f"`{made['digest'][:12]}`"}
        for asset, made in provenance["lineage"].items()
    ]
    return (
        f"eagle3-pipeline at commit `{provenance['commit']}`, recipe `{provenance['recipe']['name']}`; "
        f"{versions}. All settings are in `provenance.json`.\n\n{markdown(rows)}"
    ).rstrip("\n")
