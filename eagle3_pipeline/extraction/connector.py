"""The connector that runs inside vLLM and writes the hidden states of a request to the staging folder.

    <staging>/
        .<request id>.safetensors.tmp        being written: nobody reads it
        <request id>.safetensors             complete, because it is renamed into place
        <request id>.safetensors.no-room     the disk was full: there will be no file
        <request id>.safetensors.failed      the write failed for another reason, which it holds

It is vLLM's own ExampleHiddenStatesConnector with these changes:

- A file gets its name when it is complete, so no lock files are needed, and a client that waits learns of a
  failed write.
- On the CPU, where vLLM's copy on CUDA streams kills the engine, the rows are copied directly. On GPUs the
  copy is vLLM's own: a stream beside the model's, into pinned memory, written by threads.
- vLLM copies the states of a request after the engine's next step, so a file came a whole step (seconds of
  prefill) after the reply. Here a request for one token is copied at the end of the step that answers it,
  and any other before the next step's forward pass.
- States that nobody waits for are not written: of an aborted request, or without a client at the folder. And
  what a killed client left there is deleted.

This is the only module of the project that imports vllm. vLLM loads it by its name, once for the scheduler
and once in each worker.
"""

import contextlib
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from eagle3_pipeline.known_vllm import RUNNER_VARIABLE, VERSIONS, require_known_inside
from eagle3_pipeline.staging import (
    FAILED_SUFFIX,
    NO_ROOM_SUFFIX,
    empty_unless_awaited,
    is_awaited,
    temporary_name,
)

# What is overridden or called, and with which arguments: the rest of vLLM may change.
_USED: dict[str, tuple[str, ...]] = {
    "build_connector_meta": ("scheduler_output",),
    "request_finished": ("request", "block_ids"),
    "bind_connector_metadata": ("connector_metadata",),
    "wait_for_save": (),
    "get_finished": ("finished_req_ids",),
    "_submit_async_write": ("pending",),
    "_write_tensors": ("tensors", "event", "filename", "lock_fd"),
    "_on_write_done": ("req_id", "future"),
    "register_kv_caches": ("kv_caches",),
}
_SWEEP_EVERY_S = 10.0
_READ = {"scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "kv_connector_block_state"}


class _Done:
    """Stands where vLLM expects the CUDA event of a copy; the copy has been made already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes `hidden_states [tokens, layers, hidden]` and `token_ids [tokens]` of each finished request."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        require_known_inside(vllm.__version__, os.environ)
        require_fitting(ExampleHiddenStatesConnector, SchedulerOutput)
        super().__init__(*arguments, **keywords)
        _require_runner(self._vllm_config)
        self.use_lock = False  # a file that has its name is complete
        self._prompts: dict[str, list[int]] = {}  # of requests for one token, until their prefill ends
        self._handed_over: set[str] = set()  # requests whose states were copied before they finished

    # In the scheduler

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What the workers shall save: of requests that finished before this step, and that end with it."""
        meta = super().build_connector_meta(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            if new.sampling_params and new.sampling_params.max_tokens == 1 and new.prompt_token_ids:
                self._prompts[new.req_id] = new.prompt_token_ids
        meta.saves_of_this_step = list(self._saves_of(scheduler_output))
        return meta

    def _saves_of(self, step: Any) -> Iterator[PendingSave]:
        """The requests whose prompt is whole with this step: one token, and they are answered."""
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        again = step.scheduled_cached_reqs
        computed |= zip(again.req_ids, again.num_computed_tokens, strict=True)
        for request, tokens in step.num_scheduled_tokens.items():
            prompt = self._prompts.get(request)
            if prompt is None or computed[request] + tokens < len(prompt):
                continue
            blocks = step.kv_connector_block_state.resolve_block_ids(request)[self._cache_kv_group_id]
            del self._prompts[request]
            self._handed_over.add(request)
            yield PendingSave(request, self._request_filenames[request], torch.tensor(prompt), list(blocks))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks must be kept until its states are copied, and the file's name."""
        name = request.request_id
        self._prompts.pop(name, None)
        if name in self._handed_over:
            self._handed_over.remove(name)
            return True, {"hidden_states_path": self._request_filenames.pop(name)}
        if request.status == RequestStatus.FINISHED_ABORTED:
            self._request_filenames.pop(name, None)
            return False, None
        kept: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return kept

    # In a worker

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step begins: copy what finished before it. Its blocks are kept, and nothing was overwritten."""
        super().bind_connector_metadata(connector_metadata)
        self._submit(connector_metadata.pending_saves)

    def wait_for_save(self) -> None:
        """The states of this step are in the cache: copy those of the requests that it answers."""
        if self.has_connector_metadata():
            self._submit(self._get_connector_metadata().saves_of_this_step)

    def _submit(self, saves: list[PendingSave]) -> None:
        while saves:
            self._submit_async_write(saves.pop(0))

    def _submit_async_write(self, pending: PendingSave) -> None:
        """On an accelerator vLLM's own way; on the CPU copy now and hand the rows to the writer threads."""
        if not self._is_tp_rank_zero:
            return
        if not is_awaited(Path(pending.filename).parent):
            self._req_copy_events[pending.req_id] = _Done()
            return
        if self._kv_cache is None or self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        # The copy must be made before this returns: the blocks go to another request afterwards.
        rows = rows_of_blocks(self._kv_cache, pending.block_ids, pending.token_ids.shape[0])
        tensors = {"hidden_states": rows, "token_ids": pending.token_ids}
        done = _Done()
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, None)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda finished: self._on_write_done(pending.req_id, finished))

    @staticmethod
    def _write_tensors(
        tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None
    ) -> None:
        """Write under a temporary name, then rename; a failure leaves a mark instead of a file."""
        path = Path(filename)
        temporary = temporary_name(path)
        try:
            ExampleHiddenStatesConnector._write_tensors(tensors, event, str(temporary), lock_fd)
            temporary.replace(path)
        except BaseException as error:
            no_room = "No space left" in str(error) or "StorageFull" in str(error)
            mark = path.with_name(path.name + (NO_ROOM_SUFFIX if no_room else FAILED_SUFFIX))
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # a full disk takes the name and not always the text
                    temporary.write_text(repr(error))
                temporary.replace(mark)
            raise

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The worker is ready: from now on the folder is looked after by the one that writes."""
        super().register_kv_caches(kv_caches)
        if self._is_tp_rank_zero:
            threading.Thread(target=self._sweep, daemon=True, name="eagle3-sweep").start()

    def _sweep(self) -> None:
        """Delete what a killed client left. Not when vLLM ends: it kills this process without asking."""
        while True:
            time.sleep(_SWEEP_EVERY_S)
            with contextlib.suppress(OSError):
                empty_unless_awaited(Path(self._storage_path))


def rows_of_blocks(cache: torch.Tensor, blocks: list[int], tokens: int) -> torch.Tensor:
    """The first `tokens` rows [tokens, layers, hidden] of `blocks`, as a copy.

    `cache` is [blocks, layers, block size, hidden], a view in which the rows of a block lie side by side. A
    run of neighbouring blocks is copied at once: three to five times faster than picking row by row.
    """
    in_order = cache.transpose(1, 2)
    size = in_order.shape[1]
    rows = torch.empty((tokens, *in_order.shape[2:]), dtype=cache.dtype)
    at = begin = 0
    while at < tokens:
        end = begin + 1
        while end < len(blocks) and blocks[end] == blocks[end - 1] + 1:
            end += 1
        taken = min((end - begin) * size, tokens - at)
        run = in_order[blocks[begin] : blocks[begin] + end - begin]
        rows[at : at + taken].copy_(run.flatten(0, 1)[:taken])
        at, begin = at + taken, end
    return rows


def require_fitting(connector: type, step: type) -> None:
    """Raise RuntimeError unless vLLM's own connector and its plan of a step are those that are used here."""
    if missing := _READ - set(inspect.get_annotations(step)):
        raise RuntimeError(f"HiddenStatesConnector does not fit this vLLM: {step.__name__} lacks {missing}")
    for name, wanted in _USED.items():
        method: Callable[..., Any] | None = getattr(connector, name, None)
        found = None
        if method is not None:
            found = tuple(argument for argument in inspect.signature(method).parameters if argument != "self")
        if found != wanted:
            raise RuntimeError(
                f"HiddenStatesConnector does not fit this vLLM: {connector.__name__}.{name} takes {found}, "
                f"expected {wanted} as in vLLM {', '.join(VERSIONS)}"
            )


def _require_runner(config: Any) -> None:
    """Raise RuntimeError unless vLLM runs the model runner that the server's fingerprint names."""
    asked = os.environ.get(RUNNER_VARIABLE)
    if asked is not None and bool(int(asked)) != config.use_v2_model_runner:
        raise RuntimeError(
            "HiddenStatesConnector does not fit this vLLM: another model runner runs than "
            f"{RUNNER_VARIABLE}={asked} asks for"
        )
