"""Alternatives of the training, as a recipe lists them."""

from typing import Any

import pytest
from pydantic import ValidationError

from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.recipe.training import Rates, Training


def _recipe(sweep: dict[str, Any], **sections: Any) -> Recipe:
    training = {"learning_rate": 1e-3, "rates": {"norm": 0.5}, "sweep": sweep}
    values: dict[str, Any] = {
        "name": "tiny",
        "target": {"path": "model"},
        "prompts": {"sources": [{"path": "train.jsonl"}], "count": 4, "per_shard": 2},
        "extraction": {"layers": [1, 2, 3]},
        "vocabulary": {"draft_tokens": 64},
        "training": training,
        "evaluation": {"sets": [{"name": "held_out", "path": "evaluation.jsonl"}]},
    }
    return Recipe.model_validate({**values, **sections})


def test_an_alternative_differs_in_what_it_names_and_in_nothing_else() -> None:
    recipe = _recipe({"same": {}, "other": {"epochs": 7, "rates": {"head": 0.1}, "draft_tokens": 32}})
    alone = recipe.model_copy(update={"training": recipe.training.model_copy(update={"sweep": {}})})
    assert recipe.alternative("same") == alone
    other = recipe.alternative("other")
    assert (other.training.epochs, other.training.learning_rate) == (7, 1e-3)
    assert other.training.rates == Rates(norm=0.5, head=0.1)
    assert other.vocabulary.draft_tokens == 32
    assert not other.training.sweep


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning_rat": 1}, "training.sweep.a: learning_rat: Extra inputs are not permitted"),
        ({"learning_rate": -1.0}, "training.sweep.a: learning_rate: Input should be greater than 0"),
        (
            {"rates": {"head": -1.0}},
            "training.sweep.a: rates.head: Input should be greater than or equal to 0",
        ),
        (
            {"test_time_steps": 4},
            "training.sweep.a sets test_time_steps, which alternatives share: remove it",
        ),
        ({"sweep": {}}, "training.sweep.a sets sweep"),
        ({"draft_tokens": 65}, "training.sweep.a.draft_tokens is 65, more than vocabulary.draft_tokens 64"),
        ({"draft_tokens": 0}, "training.sweep.a.draft_tokens is 0, expected a number above 0"),
        ({"draft_tokens": True}, "training.sweep.a.draft_tokens is True, expected a number"),
    ],
)
def test_an_alternative_that_cannot_be_trained_or_compared_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError) as refusal:
        _recipe({"a": changes})
    assert said in str(refusal.value)


def test_a_base_draft_keeps_its_vocabulary_in_every_alternative() -> None:
    with pytest.raises(ValidationError, match=r"sweep.a sets draft_tokens, but base_draft keeps"):
        _recipe({"a": {"draft_tokens": 32}}, base_draft={"path": "draft"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("per_layer_norm", True),
        ("norm_output", True),
        ("norm_before_residual", True),
        ("attention_window", 64),
        ("intermediate_size", 128),
    ],
)
def test_what_shapes_a_new_draft_is_refused_with_a_base_draft_wherever_it_is_set(
    name: str, value: int
) -> None:
    base = {"base_draft": {"path": "draft"}}
    with pytest.raises(ValidationError, match=rf"training sets {name} for a new draft, but base_draft keeps"):
        _recipe({}, training={name: value}, **base)
    with pytest.raises(ValidationError, match=rf"training.sweep.a sets {name} for a new draft"):
        _recipe({"a": {name: value}}, **base)
    assert _recipe({"a": {"epochs": 7}}, **base).alternative("a").training.epochs == 7


def test_alternatives_in_waves_are_refused_when_the_recipe_is_read() -> None:
    waves = {"extraction": {"layers": [1, 2, 3], "waves": 2}}
    with pytest.raises(ValidationError, match=r"compares 1 trainings .* in 2 waves.*run.shards"):
        _recipe({"a": {}}, **waves)
    assert _recipe({}, **waves).extraction.waves == 2
    assert _recipe({"a": {}}, extraction={"layers": [1, 2, 3], "waves": "auto"}).training.sweep == {"a": {}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rates": {"fusion": 0.0, "layer": 0.0, "norm": 0.0, "head": 0.0}},
            "training.rates has 0 for all parts: nothing is trained",
        ),
        (
            {"rates": {"fusion": 0.0, "layer": 0.0, "norm": 0.0}, "train_head": False},
            "training.rates has 0 for all parts but head, and train_head is false: nothing is trained",
        ),
        (
            {"attention_window": 3},
            "training.attention_window is 3, training.test_time_steps 3: drafted tokens alone would fill",
        ),
    ],
)
def test_a_training_of_nothing_or_of_a_window_full_of_drafts_is_refused_alone_and_as_an_alternative(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError) as refusal:
        Training.model_validate(changes)
    assert said in str(refusal.value)
    with pytest.raises(ValidationError, match=r"training\.sweep\.a: ") as refusal:
        _recipe({"a": changes})
    assert said in str(refusal.value)


def test_what_trains_one_part_or_sees_one_token_more_is_taken() -> None:
    head = Rates(fusion=0, layer=0, norm=0)
    assert Training(rates=head).rates.head == 1
    assert Training(rates=Rates(head=0, layer=0), train_head=False).rates.fusion == 1
    assert Training(attention_window=4, test_time_steps=3).attention_window == 4


def test_an_early_end_in_waves_is_refused_when_the_recipe_is_read() -> None:
    training = {"patience": 2}
    waves = {"layers": [1, 2, 3], "waves": 2}
    with pytest.raises(ValidationError, match=r"training.patience is 2, .* in 2 waves.*run.shards"):
        _recipe({}, training=training, extraction=waves)
    assert _recipe({}, training=training, extraction={**waves, "waves": "auto"}).training.patience == 2
