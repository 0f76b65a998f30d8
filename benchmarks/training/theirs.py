"""`speculators train`, with its own trainer and loader, and a clock around its steps.

    python -m benchmarks.training.theirs --numbers OUT.json --verifier-name-or-path ... its own options

Where there is no accelerator, its trainer is told that its device is the CPU, and what waits for the device
does nothing: no more is changed. The clock runs from the second step to the end of an epoch, and from the
start to the end of each further one: starting workers, validation and checkpoints are not in it.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.training.their_data import draft_tokens
from eagle3_pipeline.training.plan import TrainingPlan

CHECKPOINT = "checkpoint_best"
"""The folder, below the one of the checkpoints, of the weights with the least validation loss."""
# flex_attention has no backward pass on the CPU, and the fused losses are Triton kernels. Both have a plain
# form, of the same function. Twelve readers, the default, are a burden for two cores.
CPU_OPTIONS = ("--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--num-workers", "1")


def workload_options(plan: TrainingPlan, data: Path, folder: Path, steps: int) -> list[str]:
    """What any two trainings have to share to be compared, as options of its command line.

    Samples, target and layers, the size of draft vocabulary and step, number of steps, and the seed. It is
    also told that it has no server to ask for states, and no mask token to look for.
    """
    return [
        *("--verifier-name-or-path", plan.target, "--target-layer-ids", *map(str, plan.layers[:-1])),
        *("--data-path", str(data), "--on-missing", "raise", "--mask-token-id", "0"),
        *("--draft-vocab-size", str(draft_tokens(data)), "--total-seq-len", str(plan.tokens_per_step)),
        *("--max-steps", str(steps), "--seed", str(plan.seed)),
        *("--save-path", str(folder / "checkpoints"), "--log-dir", str(folder / "logs")),
    ]


def same_settings(plan: TrainingPlan) -> list[str]:
    """This project's settings as options of its command line, but for the head, which it cannot train.

    Norms and attention are those of a recipe that leaves them as they are.
    """
    return [
        *("--optimizer", plan.optimizer, "--lr", str(plan.learning_rate)),
        *("--weight-decay", str(plan.weight_decay), "--scheduler-type", "cosine"),
        *("--scheduler-warmup-ratio", str(plan.warmup_share), "--loss-fn", plan.loss),
        *("--ttt-steps", str(plan.test_time_steps), "--ttt-step-loss-decay", str(plan.step_decay)),
        *("--fc-norm", "--no-norm-before-fc", "--no-norm-output", "--full-attention-indices", "0"),
    ]


def command(numbers: Path, options: list[str]) -> list[str]:
    """The command that runs it and leaves its numbers in a file."""
    return [sys.executable, "-m", "benchmarks.training.theirs", "--numbers", str(numbers), *options]


def train(options: list[str]) -> dict[str, float]:
    """Run `speculators train` with these options; steps, and tokens and seconds of those in the clock."""
    import torch
    from speculators.train import cli
    from speculators.train.config import TrainConfig

    clocks: list[Clock] = []
    trainer = _timed(cli.Trainer, clocks)
    with mock.patch.object(cli, "Trainer", trainer), _device(torch.accelerator):
        cli.main(TrainConfig.resolve(options))
    return clocks[0].numbers()


class Clock:
    """Seconds, steps and tokens of the training, less those that warm up."""

    def __init__(self) -> None:
        self.steps = 0
        self._tokens: list[Any] = []
        self._seconds = 0.0
        self._timed: list[int] = []
        self._since: float | None = None

    def count(self, document_ids: Any) -> None:
        """A batch comes in; -1 marks padding."""
        self._tokens.append((document_ids != -1).sum())

    def stepped(self) -> None:
        """A step is done: the first one warms up, so that its end starts the clock."""
        self.steps += 1
        if self._since is not None:
            self._timed.append(self.steps - 1)
        elif self.steps == 1:
            self.start()

    def start(self) -> None:
        """Let it run; the device has nothing left to do."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """Halt it; the device has nothing left to do."""
        if self._since is not None:
            self._seconds += time.monotonic() - self._since
        self._since = None

    def numbers(self) -> dict[str, float]:
        """What was counted."""
        tokens = sum(int(self._tokens[at]) for at in self._timed)
        return {
            "steps": self.steps,
            "tokens": tokens,
            "seconds": round(self._seconds, 3),
            "tokens_per_second": round(tokens / self._seconds, 1),
            "seconds_per_step": round(self._seconds / len(self._timed), 4),
        }


def epochs_for(steps: int, sampler: Any) -> int:
    """In how many epochs so many steps are done: its own loop would do one more step in each further one."""
    epoch = 0
    while steps > 0:
        sampler.set_epoch(epoch)
        steps -= len(sampler)
        epoch += 1
    return epoch


def _timed(base: Any, clocks: list[Clock]) -> Any:
    """Its Trainer with a clock, on whatever device there is."""
    import torch

    class Timed(base):  # type: ignore[misc]
        def __init__(self, model: Any, config: Any, train_loader: Any, val_loader: Any = None) -> None:
            self._clock = Clock()
            clocks.append(self._clock)
            epochs = epochs_for(config.max_steps, train_loader.batch_sampler)
            super().__init__(model, config._replace(num_epochs=epochs), train_loader, val_loader)
            self.model.register_forward_pre_hook(self._count, with_kwargs=True)

        def setup_trainer(self) -> None:
            if not torch.accelerator.is_available():
                self.local_rank = self.device_type = "cpu"
            super().setup_trainer()

        def train_epoch(self, epoch: int, **keywords: Any) -> None:
            if self._clock.steps:
                self._clock.start()
            super().train_epoch(epoch, **keywords)
            torch.accelerator.synchronize()
            self._clock.stop()

        def _schedulers_step(self) -> None:
            super()._schedulers_step()
            if not self._clock.steps:
                torch.accelerator.synchronize()
            self._clock.stepped()

        def _count(self, model: Any, _: Any, batch: dict[str, Any]) -> None:
            if model.training:
                self._clock.count(batch["document_ids"])

    return Timed


@contextlib.contextmanager
def _device(accelerator: Any) -> Iterator[None]:
    if accelerator.is_available():
        yield
        return
    with mock.patch.object(accelerator, "synchronize"):
        yield


def main(arguments: list[str] | None = None) -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--numbers", type=Path, required=True, help="file for what was counted")
    options, their_own = parser.parse_known_args(arguments)
    options.numbers.write_text(json.dumps(train(their_own)) + "\n")


if __name__ == "__main__":
    main()
