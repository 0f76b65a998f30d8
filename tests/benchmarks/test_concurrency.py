from benchmarks.generation.concurrency import summary


def test_auto_is_compared_with_the_best_fixed_number_by_the_medians_of_the_rounds() -> None:
    rates = {32: [380.0, 390.0, 385.0], 64: [300.0, 450.0, 440.0], "auto": [430.0, 418.0, 100.0]}
    jobs = [
        {"setting": setting, "tokens_per_second": rates[setting][number], "without_tail": 400.0}
        for number in range(3)
        for setting in rates
    ]
    found = summary(jobs)
    assert found["medians"][64]["tokens_per_second"] == 440
    assert found["tokens_per_second"] == {"best_fixed": 64, "auto_to_best": 0.95}
    assert found["without_tail"]["auto_to_best"] == 1
