"""The connector that runs inside vLLM and writes the hidden states of a request to the staging folder.

    <staging>/
        .<request id>.safetensors.tmp        being written: nobody reads it
        <request id>.safetensors             complete, because it is renamed into place
        <request id>.safetensors.no-room     the disk was full: there will be no file
        <request id>.safetensors.failed      the write failed for another reason, which it holds

It is vLLM's own ExampleHiddenStatesConnector with two changes. A file gets its name when it is
complete, so no lock files are needed, and a client that waits learns of a failed write. On the CPU,
where vLLM's copy on CUDA streams kills the engine, the rows are copied directly.

This is the only module of the project that imports vllm. vLLM loads it by its name.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)

from eagle3_pipeline.staging import FAILED_SUFFIX, NO_ROOM_SUFFIX, temporary_name


class _Done:
    """Stands where vLLM expects the CUDA event of a copy; the copy has been made already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes `hidden_states [tokens, layers, hidden]` and `token_ids [tokens]` of each finished request."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.use_lock = False  # a file that has its name is complete

    def _submit_async_write(self, pending: PendingSave) -> None:
        """On an accelerator vLLM's own way; on the CPU copy now and hand the rows to the writer threads."""
        if self._kv_cache is None or self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = blocks[:, None] * self._block_size + torch.arange(self._block_size)
        rows = extract_from_kv_cache(self._kv_cache, slots.flatten(), pending.token_ids.shape[0])
        # The copy must be made before this returns: the blocks go to another request afterwards.
        tensors = {"hidden_states": rows.clone(), "token_ids": pending.token_ids.clone()}
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
            temporary.unlink(missing_ok=True)
            no_room = "No space left" in str(error) or "StorageFull" in str(error)
            mark = path.with_name(path.name + (NO_ROOM_SUFFIX if no_room else FAILED_SUFFIX))
            with contextlib.suppress(OSError):  # a full disk takes the name and not always the text
                mark.touch()
                mark.write_text(repr(error))
            raise
