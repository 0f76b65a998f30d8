"""The model card: README.md with the hub's front matter, for somebody who has only the released folder."""

import json
import shlex
from typing import Any

import yaml

from eagle3_pipeline.alternatives import chosen
from eagle3_pipeline.evaluation.agreement import served_length
from eagle3_pipeline.evaluation.report import report_markdown_table, verdict
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe.prompts import PromptSource
from eagle3_pipeline.recipe.settings import Recipe
from eagle3_pipeline.release.names import public_name, target_name


def serve_line(recipe: Recipe, draft: str, *, target: str | None = None) -> str:
    """The vLLM command that serves the target with the draft in folder `draft`, ready for a POSIX shell.

    `target` is the target's folder or id where it is not the public name.
    """
    speculation = {
        "method": "eagle3",
        "model": draft,
        "num_speculative_tokens": recipe.evaluation.speculative_tokens,
    }
    command = ["vllm", "serve", target or target_name(recipe.target)]
    if recipe.target.hub_id is not None and recipe.target.revision != "main":
        command += ["--revision", recipe.target.revision]
    if recipe.target.trust_remote_code:
        command.append("--trust-remote-code")
    return shlex.join([*command, "--speculative-config", json.dumps(speculation)])


def model_card(lineage: Lineage, name: str, provenance: dict[str, Any]) -> str:
    """README.md of the released folder called `name`; `provenance` is the content of provenance.json."""
    recipe = lineage.recipe
    report = lineage.acceptance_report().require().facts
    target = target_name(recipe.target)
    parts = [
        _front_matter(recipe),
        f"# {name}\n\nAn EAGLE-3 draft model: it lets vLLM answer with **{target}** in fewer steps, by "
        f"proposing {recipe.evaluation.speculative_tokens} tokens that the target then checks at once. The "
        "target decides on every token; without it this draft is of no use.",
        _serving(recipe, name),
        f"## Measured\n\n{report_markdown_table(report)}\n{verdict(report)}\n\n{_conditions(report)}",
        f"## Trained on\n\n{_training(lineage)}",
        f"## Made by\n\n{_made_by(provenance)}",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(recipe: Recipe) -> str:
    values: dict[str, Any] = {
        "license": recipe.release.license,
        "library_name": "speculators",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "eagle3", "draft-model", "vllm"],
    }
    if (base := public_name(recipe.target)) is not None:
        values["base_model"] = [base]
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def _serving(recipe: Recipe, name: str) -> str:
    text = (
        f"## Serving\n\nFrom the folder that holds this one as `{name}`:\n\n"
        f"```bash\n{serve_line(recipe, f'./{name}')}\n```\n\n"
        "With the CPU wheel of vLLM, write `python -m vllm.entrypoints.openai.api_server --model` for "
        "`vllm serve`. `sha256sum -c SHA256SUMS` checks the files."
    )
    if recipe.target.package is not None:
        text += (
            f"\n\nThe target was taken from the GGUF file in the package `{recipe.target.package}`, expanded "
            "to bfloat16. Its weights were rounded by quantization, so acceptance with the original weights "
            "differs a little."
        )
    return text


def _conditions(report: dict[str, Any]) -> str:
    text = (
        "`length` is the acceptance length, 1 + accepted tokens per draft, from the server's own counters "
        f"over {report['drafts']} drafts; `pos k` is the share of drafts whose k-th token was accepted; "
        "`same` is the share of replies with identical tokens with and without the draft. "
        f"Temperature {report['temperature']:g}, {report['in_flight']} requests in flight, at most "
        f"{report['max_completion_tokens']} tokens a reply, held-out prompts. Speed is of the machine it was "
        "measured on."
    )
    if report["simulation_agrees"] is None:
        return text
    compared = report["simulation"]
    return (
        f"{text} On {compared['served']} conversations held out from training, answered greedily, the length "
        f"was {served_length(compared, 2)}; simulated in training: {compared['simulated_length']:.2f}."
    )


def _training(lineage: Lineage) -> str:
    recipe = lineage.recipe
    shards = [
        manifest.facts for manifest in lineage.made([lineage.synthetic_samples(one) for one in recipe.shards])
    ]
    draft, training = lineage.draft_checkpoint().require().facts, chosen(lineage).recipe.training

    def total(fact: str) -> str:
        return f"{sum(shard.get(fact, 0) for shard in shards):,}"

    lines = [
        f"- prompts from {', '.join(_source_name(source) for source in recipe.prompts.sources)}",
        f"- {total('samples')} replies by the target itself ({total('good')} good, {total('truncated')} "
        f"truncated), {total('completion_tokens')} completion tokens, "
        f"temperature {recipe.generation.temperature:g}",
        f"- hidden states of layers {', '.join(map(str, recipe.extraction.layers[:-1]))} (id k is what "
        "enters layer k)",
        f"- {draft.get('steps', '?')} steps, {training.epochs} epochs, learning rate "
        f"{training.learning_rate:g}, {training.test_time_steps} test-time-training steps",
    ]
    if recipe.base_draft is not None:
        base = recipe.base_draft
        lines.append(f"- starting from {base.hub_id or (base.path and base.path.name)}")
    return "\n".join(lines)


def _source_name(source: PromptSource) -> str:
    if source.dataset is None:
        return f"the file `{source.path and source.path.name}`"
    return f"`{source.dataset}` ({', '.join(one for one in (source.subset, source.split) if one)})"


def _made_by(provenance: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    rows = [
        f"| {asset} | `{made['fingerprint'][:12]}` | `{made['digest'][:12]}` |"
        for asset, made in provenance["lineage"].items()
    ]
    table = "\n".join(["| thing | made from | content |", "| --- | --- | --- |", *rows])
    return (
        f"eagle3-pipeline at commit `{provenance['commit']}`, recipe `{provenance['recipe']['name']}`; "
        f"{versions}. All settings are in `provenance.json`.\n\n{table}"
    )
