"""A conversation that outgrows the server's context, on the stand-in, which has vLLM's rule for it."""

import asyncio
from pathlib import Path

from eagle3_pipeline.generation.client import GenerationClient
from eagle3_pipeline.generation.conversation import Conversation
from eagle3_pipeline.generation.reply import RequestRefused
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.recipe.generation import Generation
from tests.fakes.process import SERVED_NAME, stand_in

CONTEXT = 160


def test_its_last_reply_gets_the_room_that_is_left_and_the_next_turn_is_refused_once(
    tmp_path: Path, tiny_llama: Path
) -> None:
    conversation = Conversation(Prompt("p", tuple(f"And {turn}?" for turn in range(40)), None, "test"))
    settings = Generation(max_completion_tokens=60)

    async def converse(url: str) -> None:
        async with GenerationClient(url, SERVED_NAME, settings) as client:
            while conversation.turns_left:
                try:
                    reply = await client.ask(conversation.messages())
                except RequestRefused as refusal:
                    conversation.add_refusal(str(refusal), client.sampling(), "s")
                else:
                    conversation.add_reply(reply, client.sampling(), "s")

    with stand_in(tmp_path, tiny_llama, "--max-model-len", str(CONTEXT), mean_tokens=30) as server:
        asyncio.run(converse(str(server.client.base_url)))
    *answered, cut, refused = conversation.samples
    assert answered
    assert all(len(one.token_ids) < CONTEXT for one in answered)
    assert (cut.verdict, len(cut.token_ids)) == ("truncated", CONTEXT)
    assert len(cut.completion_token_ids) < settings.max_completion_tokens
    assert (refused.verdict, refused.turn) == ("refused", len(answered) + 1)
    assert f"maximum context length is {CONTEXT} tokens" in refused.content
    assert (refused.prompt_token_ids, refused.usage) == ([], {})
    assert conversation.ended_early
