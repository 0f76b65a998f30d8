import pytest

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.evaluation.measurement import Measurement
from eagle3_pipeline.evaluation.report import report_markdown, report_table, summarise, verdict
from eagle3_pipeline.recipe.evaluation import Evaluation
from tests.release.made import REPORT

SETTINGS = Evaluation.model_validate({"sets": [{"name": "a", "path": "a.jsonl"}]})


def measurement(
    tokens: int, seconds: float, *, drafts: int = 0, refused: tuple[str, ...] = ()
) -> Measurement:
    counts = AcceptanceCounts(drafts, 3 * drafts, drafts, (drafts, 0, 0)) if drafts else None
    return Measurement({"p": tuple(range(tokens))}, refused, tokens, seconds, seconds, counts)


def test_the_total_is_pooled_and_not_a_mean_of_the_sets() -> None:
    without = {"a": measurement(10, 1.0), "b": measurement(90, 3.0)}
    with_draft = {"a": measurement(10, 0.5, drafts=5), "b": measurement(90, 1.5, drafts=45)}
    report = summarise(SETTINGS, without, with_draft)
    assert report["drafts"] == 50
    assert report["tokens_per_second_without"] == 25.0
    assert report["tokens_per_second_with"] == 50.0
    assert report["speedup"] == 2.0
    assert report["sets"]["a"]["tokens_per_second_without"] == 10.0
    assert report["prompts"] == 2


def test_speeds_over_other_prompts_are_not_compared() -> None:
    with pytest.raises(QualityError, match="not comparable"):
        summarise(
            SETTINGS, {"a": measurement(10, 1.0)}, {"a": measurement(10, 1.0, drafts=5, refused=("q",))}
        )


@pytest.mark.parametrize(
    ("speedup", "words"), [(1.3, "faster"), (1.02, "no measurable difference"), (0.7, "SLOWER")]
)
def test_the_verdict_says_what_was_measured_even_when_the_draft_does_not_help(
    speedup: float, words: str
) -> None:
    said = verdict(REPORT | {"speedup": speedup})
    assert words in said
    assert f"({speedup:.2f} x)" in said


def test_the_table_lines_up_and_has_each_set_and_the_total() -> None:
    table = report_table(REPORT).splitlines()
    head, rule, everyday, total = table[:4]
    assert len({len(line) for line in (head, rule, everyday, total)}) == 1
    assert everyday.startswith("everyday")
    assert total.startswith("all")
    assert "1.500" in total


def test_simulated_and_served_acceptance_stand_side_by_side() -> None:
    assert "1.600 simulated, 1.590 served" in report_table(REPORT)
    text = report_markdown(REPORT)
    assert "| acceptance | length | pos 1 | pos 2 | pos 3 |" in text
    assert "| simulated | 1.600 | 0.300 | 0.200 | 0.100 |" in text
    assert "| served | 1.590 | 0.300 | 0.200 | 0.090 |" in text
    assert "| ratio | 0.994 | 1.000 | 1.000 | 0.900 |" in text
    assert text.endswith("They agree within 3%.\n")


def test_a_report_that_compares_nothing_is_whole_and_says_so() -> None:
    nothing = {"simulation": None, "simulation_agrees": None, "simulation_ratio": None}
    text = report_markdown(REPORT | nothing)
    assert "| simulated |" not in text
    assert "are not compared" in text


def test_replies_that_part_are_explained_and_refused_prompts_named() -> None:
    text = report_markdown(REPORT | {"identical_share": 0.75, "refused": 2})
    assert "75% of the replies are identical" in text
    assert "2 prompts" in text
