from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import attention
from benchmarks.gpu import training as gpu
from benchmarks.training.flops import Rows, count_rows, flops, peak_of, utilization
from benchmarks.training.invented import SHAPES, Shape
from eagle3_pipeline.recipe.training import Training
from eagle3_pipeline.training.attention import Context, make_context
from eagle3_pipeline.training.geometry import Run
from eagle3_pipeline.training.plan import TrainingPlan
from tests.benchmarks.conftest import TINY


class Scripted:
    """Contestants with a speed each; every round is slower than the one before."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ours(self) -> dict[str, float]:
        return self._run("ours", 1500.0)

    def speculators(self) -> dict[str, float]:
        return self._run("speculators", 1000.0)

    def ours_with_head(self) -> dict[str, float]:
        return self._run("ours_with_head", 1200.0)

    def _run(self, who: str, speed: float) -> dict[str, float]:
        self.asked.append(who)
        return {"tokens_per_second": speed / self.asked.count(who)}


def test_operations_are_counted_by_hand_for_one_sample() -> None:
    shape = Shape(
        hidden=4, heads=2, key_heads=1, head_dim=2, intermediate=5, vocabulary=9, draft_tokens=3, layers=12
    )
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 1])  # that of batches.py: rows 2, 3 and 4 propose
    rows = count_rows([mask])
    assert rows == Rows(rows=6, supervised=3, keys=3 + 4 + 5)
    fc, keys_and_values, queries, output, mlp, head = 3 * 16, 2 * 8 * 2, 8 * 4, 4 * 4, 3 * 4 * 5, 4 * 3
    first = 6 * (fc + keys_and_values) * 6 + 2 * head * 3
    step = 3 * 6 * (queries + output + mlp)
    attention = 12 * 4 * (12 + (12 + 3))
    found = flops(shape, rows, steps=2, train_head=True)
    assert found == first + 2 * (step + 3 * 6 * head) + 3 * 6 * keys_and_values + attention
    assert found - flops(shape, rows, steps=2, train_head=False) == 2 * 3 * 2 * head


def test_mfu_is_the_share_of_the_peak_that_useful_operations_take() -> None:
    assert utilization(tokens_per_second=10_000, flops_per_token=9.89e9, peak=989e12) == pytest.approx(0.1)
    assert peak_of("NVIDIA H200") == 989e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("NVIDIA H100 PCIe") is None
    assert peak_of("NVIDIA GeForce RTX 3090") is None


def test_on_a_gpu_speculators_trains_with_this_projects_settings(plan: TrainingPlan, data: Path) -> None:
    from speculators.train.config import TrainConfig

    config = TrainConfig.resolve(gpu.their_options(plan, data, Path("out"), steps=7))
    settings = Training()
    assert config.optimizer.optimizer == settings.optimizer == "adamw"
    assert config.optimizer.lr == settings.learning_rate
    assert config.optimizer.weight_decay == settings.weight_decay
    assert config.scheduler.scheduler_type == "cosine"
    assert config.scheduler.scheduler_warmup_ratio == settings.warmup_share
    assert config.loss.loss_fn == settings.loss
    assert config.loss.ttt_steps == settings.test_time_steps
    assert config.loss.ttt_step_loss_decay == settings.step_decay
    assert (config.draft.fc_norm, config.draft.norm_before_fc) == (settings.per_layer_norm, False)
    assert config.draft.norm_output == settings.norm_output
    assert (config.draft.full_attention_indices, settings.attention_window) == ([0], None)
    assert config.data.total_seq_len == plan.tokens_per_step
    # Its own ways on a GPU stay as they are.
    assert config.draft.draft_attn_impl == "simple_flex_attention"
    assert config.loss.loss_implementation == "fused"


def test_on_a_gpu_all_take_turns_and_mfu_is_by_what_each_trains(plan: TrainingPlan) -> None:
    work = gpu.Work(frozen_head=2e9, with_head=3e9, peak=1e15)
    contest = Scripted()
    found = gpu.hold(contest, work, rounds=2)
    three = ["ours", "speculators", "ours_with_head"]
    assert contest.asked == [*three, *three, *reversed(three)]
    assert found["ours_to_speculators"]["median"] == 1.5
    assert found["mfu_percent"]["ours"]["most"] == 0.15
    assert found["mfu_percent"]["ours_with_head"]["most"] == 0.18
    counted = gpu.Work.of(replace(plan, test_time_steps=3), TINY, peak=1e15)
    assert 0 < counted.frozen_head < counted.with_head


def test_attention_that_differs_from_the_cpu_ends_a_benchmark_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu = torch.device("cpu")
    assert 0 < attention.require_same_attention(cpu) < 0.01  # bfloat16 alone

    def off_by_one(
        runs: tuple[Run, ...], window: int | None, step: int, dtype: torch.dtype, device: torch.device
    ) -> Context:
        is_ours = dtype == torch.bfloat16
        return make_context(runs, window - 1 if window and is_ours else window, step, dtype, device)

    monkeypatch.setattr(attention, "make_context", off_by_one)
    with pytest.raises(SystemExit, match=r"window 24\): output differs by 0\.\d+ from the CPU's"):
        attention.require_same_attention(cpu)
    monkeypatch.setattr(gpu, "quiet_environment", lambda devices: {"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(RuntimeError, match="no GPU here: torch shows none"):
        gpu.check_attention(tmp_path, "0")


def test_the_gpu_benchmark_says_so_where_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.nvml, "nvml", lambda: None)
    assert gpu.main(["--gpu", "3", "--shape", "kimi-k2"]) == 2
    assert "no GPU here" in capsys.readouterr().err
    assert gpu.parse(["--peak-tflops", "165"]).peak_tflops == 165
    assert set(SHAPES) == {"smollm2", "llama-8b", "kimi-k2"}
