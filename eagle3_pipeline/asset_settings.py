"""Which settings of the recipe each asset depends on: its own, and those of all that it is made from.

Its own are a part of its fingerprint, beside what it is made from (lineage.py). With the settings of all that
it is made from they are known before anything is made, so that an orchestrator can say from the recipe alone
what a changed setting will make anew:

    generation.temperature      samples, their audit, states, vocabulary, draft, report, release
    training.learning_rate      draft, report, release
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.recipe import Recipe

Described = Callable[[dict[str, Any]], dict[str, Any]]
"""Puts into the settings of a source, in place of its `path`, what the file is known by."""


def of_prompts(recipe: Recipe, described: Described) -> dict[str, Any]:
    """What fixes the prompts and their order, and what they are held apart from."""
    settings = recipe.settings("prompts")["prompts"]
    sets = [{"path": str(one.path), "column": one.column} for one in recipe.evaluation.sets]
    return {
        **settings,
        "sources": fingerprint([described(one) for one in settings["sources"]]),
        "held_out": fingerprint([described(one) for one in sets]),
    }


def of_samples(recipe: Recipe) -> dict[str, Any]:
    """How the target answers."""
    sampling = ("max_completion_tokens", "temperature", "top_p", "top_k")
    return {
        "sampling": {name: getattr(recipe.generation, name) for name in sampling},
        "server": recipe.server.generation.result_settings(),
    }


def of_audit(recipe: Recipe) -> dict[str, Any]:
    """What samples must fulfil, and how their states are planned."""
    bounds = {"max_truncated_share", "max_rejected_share", "max_degenerate_share"}
    form = {"layers", "max_sample_tokens", "precision", "kept", "waves", "passes"}
    return {
        "bounds": recipe.generation.model_dump(
            mode="json", include={*bounds, "completion_lengths", "train_truncated"}
        ),
        "extraction": recipe.extraction.model_dump(mode="json", include=form),
    }


def of_states(recipe: Recipe) -> dict[str, Any]:
    """Which states are kept of which samples, in which form."""
    form = {"layers", "max_sample_tokens", "precision", "kept", "while_generating"}
    return {
        **recipe.extraction.model_dump(mode="json", include=form),
        "train_truncated": recipe.generation.train_truncated,
        "server": recipe.server.extraction.result_settings(),
    }


def of_vocabulary(recipe: Recipe) -> dict[str, Any]:
    """Which tokens are counted, and how many are kept. How many are speculated changes only its facts."""
    return {
        "train_truncated": recipe.generation.train_truncated,
        **recipe.extraction.model_dump(mode="json", include={"max_sample_tokens", "while_generating"}),
        "max_model_len": recipe.server.extraction.max_model_len,
        "draft_tokens": recipe.vocabulary.draft_tokens,
        "speculative_tokens": recipe.evaluation.speculative_tokens,
    }


def of_training(recipe: Recipe) -> dict[str, Any]:
    """All of the training but when a checkpoint is written, which changes no weight."""
    training = recipe.settings("training")["training"]
    del training["checkpoint_every_s"]
    return {"training": training}


def of_evaluation(recipe: Recipe, described: Described) -> dict[str, Any]:
    """What is measured, and on which server."""
    evaluation = recipe.settings("evaluation")["evaluation"]
    return {
        "evaluation": {**evaluation, "sets": [described(one) for one in evaluation["sets"]]},
        "server": recipe.server.evaluation.result_settings(with_speed=True),
    }


def of_release(recipe: Recipe) -> dict[str, Any]:
    """What must hold, and what is written. Where it is published changes nothing in it."""
    release = recipe.settings("release")["release"]
    return {"release": {key: value for key, value in release.items() if key not in ("folder", "publish")}}


def settings_version(recipe: Recipe, asset: str) -> str:
    """Hex value that changes with any setting that `asset` follows from, before anything is made.

    Files count by name and size: nothing is read. What is known only once a thing is made leaves it as it
    is: whether other evaluation sets drop a prompt, whether another folder holds the same model.
    """
    return fingerprint(_followed(recipe)[asset])[:12]


def _followed(recipe: Recipe) -> dict[str, Any]:
    """The settings that each asset follows from."""
    target = _named(recipe.settings("target")["target"])
    base = _named(recipe.base_draft.model_dump(mode="json")) if recipe.base_draft else None
    prompts = of_prompts(recipe, _named)
    # More prompts are added behind those that are there, and other evaluation sets seldom drop one.
    order = {name: value for name, value in prompts.items() if name not in ("count", "held_out")}
    samples = {"from": [target, order], **of_samples(recipe)}
    states = {"from": samples, **of_states(recipe)}
    shards = list(recipe.shards)
    audit = {"from": [samples, shards], **of_audit(recipe)}
    vocabulary = {"from": [samples, shards, target, base], **of_vocabulary(recipe)}
    tokens = {name: value for name, value in vocabulary.items() if name != "speculative_tokens"}
    plan = [recipe.extraction.waves, recipe.extraction.passes]
    draft = {"from": [states, shards, tokens, base, plan], **of_training(recipe)}
    report = {"from": [draft, target], **of_evaluation(recipe, _named)}
    return {
        "target_model": target,
        "base_draft": [base, target],
        "prompts": {"from": target, **prompts},
        "synthetic_samples": samples,
        "sample_audit": audit,
        "hidden_state_shards": states,
        "vocabulary_map": vocabulary,
        "draft_checkpoint": draft,
        "acceptance_report": report,
        "released_draft": {"from": report, **of_release(recipe)},
    }


def _named(settings: dict[str, Any]) -> dict[str, Any]:
    """A source by the name and the size of its file: the checkout may be moved."""
    if settings.get("path") is None:
        return settings
    path = Path(settings["path"])
    return {**settings, "path": [path.name, path.stat().st_size if path.is_file() else None]}
