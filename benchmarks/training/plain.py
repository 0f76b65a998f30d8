"""A plain loop over speculators' EAGLE-3 model, collation and files on the CPU, with this project's settings.

    python -m benchmarks.training.plain PLAN.json DATA --steps 48

The model is made as the plan says, so that both loops train the same parameters from the same start. All
that runs is speculators': forward with its mask and its loss, dataset, packing and collation; around it stand
the lines that any loop has. Prints one JSON line; the first steps warm up and are not counted.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.training.their_data import write_their_data
from eagle3_pipeline.training.draft import trained_parameters
from eagle3_pipeline.training.plan import TrainingPlan
from eagle3_pipeline.training.process import build_model

WARM_UP_STEPS = 3
_BETAS = (0.9, 0.95)


def train(plan: TrainingPlan, data: Path, steps: int, workers: int) -> dict[str, float]:
    """Train `steps` steps in bf16 autocast; tokens and seconds of those after the warm-up."""
    from speculators.losses import resolve_loss_config
    from transformers import get_cosine_schedule_with_warmup

    model = build_model(plan).train()
    parameters = list(trained_parameters(model).values())
    optimizer = torch.optim.AdamW(parameters, plan.learning_rate, _BETAS, weight_decay=plan.weight_decay)
    schedule = get_cosine_schedule_with_warmup(optimizer, round(plan.warmup_share * steps), steps)
    settings = {
        "ttt_steps": plan.test_time_steps,
        "ttt_step_loss_decay": plan.step_decay,
        "loss_config": resolve_loss_config(plan.loss, "eager"),
    }
    batches = _batches(plan, data, workers)
    tokens, began = 0, time.monotonic()
    for step in range(steps):
        if step == WARM_UP_STEPS:
            tokens, began = 0, time.monotonic()
        batch = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss, _ = model(**batch, **settings)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, plan.max_gradient_norm)
        optimizer.step()
        schedule.step()
        tokens += int((batch["document_ids"] != -1).sum())
    seconds = time.monotonic() - began
    return {
        "steps": steps,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "loss": round(float(loss.detach()), 4),
    }


def _batches(plan: TrainingPlan, data: Path, workers: int) -> Iterator[dict[str, Any]]:
    """Packed and padded batches of one epoch after the other, as speculators makes them."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.dataloader import create_train_val_loaders

    loader, _ = create_train_val_loaders(
        data_path=str(data),
        total_seq_len=plan.tokens_per_step,
        hidden_states_dtype=torch.bfloat16,
        vllm_endpoint="",
        on_missing="raise",
        verifier_name_or_path=plan.target,
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=_hidden_size(Path(plan.target)),
        num_target_layers=len(plan.layers) - 1,
        num_workers=workers,
        prefetch_factor=4,
        preprocess=shift_batch,
        train_data_ratio=0.95,
        seed=plan.seed,
    )
    epoch = 0
    while True:
        loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        yield from loader
        epoch += 1


def _hidden_size(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["hidden_size"])


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("data", type=Path, help="folder of their data, written where it is not there")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1, help="processes that read")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    plan = TrainingPlan.read(options.plan)
    print(json.dumps(train(plan, write_their_data(options.data, plan), options.steps, options.workers)))


if __name__ == "__main__":
    main()
