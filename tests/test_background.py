import asyncio
import threading

from eagle3_pipeline.background import repeated
from eagle3_pipeline.generation.job import _end_of


def test_news_are_told_at_the_beginning_again_and_again_and_at_the_end() -> None:
    told = threading.Semaphore(0)
    with repeated(0.001, told.release):
        for _ in range(5):
            assert told.acquire(timeout=10)
    assert told.acquire(timeout=10)
    assert not [thread for thread in threading.enumerate() if thread.name == "repeated"]


def test_what_is_being_written_is_written_also_when_the_job_is_cancelled_again() -> None:
    written: list[str] = []

    async def write() -> None:
        await asyncio.sleep(0.02)
        written.append("the last reply")

    async def close() -> None:
        await _end_of(asyncio.create_task(write()))

    async def main() -> None:
        closing = asyncio.create_task(close())
        for _ in range(3):
            await asyncio.sleep(0)
            closing.cancel()
        await closing

    asyncio.run(main())
    assert written == ["the last reply"]
