"""Two chats at once with the project's own asyncio client, and what the pipeline did for them."""

import asyncio

from clients import AsyncClient, Streaming


async def ask(client: AsyncClient, question: str) -> str:
    text, cycles = "", 0
    async with client.stream_chat(
        [{"role": "user", "content": question}],
        Streaming(pipeline=True),
        temperature=0,
        max_tokens=32,
    ) as stream:
        async for chunk in stream:
            text += chunk.text
            cycles += len(chunk.pipeline.cycles) if chunk.pipeline else 0
    return f"{text} ({cycles} cycles)" if cycles else text


async def main() -> None:
    async with AsyncClient() as client:
        questions = ["What is the capital of France?", "What is the capital of Spain?"]
        for answer in await asyncio.gather(*(ask(client, question) for question in questions)):
            print(answer)


asyncio.run(main())
