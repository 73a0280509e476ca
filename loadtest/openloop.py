"""The open loop: requests go out when they are planned, whatever became of the others."""

import asyncio
import time

from clients import AsyncClient, ClientError, Retries
from loadtest.block import Block
from loadtest.sample import Recording, Sample
from loadtest.scenario import Planned

TIMEOUT_S = 300.0


async def send_open(block: Block) -> list[Sample]:
    """All requests of a block, in the order of their plan. A refused one is not sent again."""
    async with AsyncClient(
        block.url, model=block.model, retries=Retries(most=0), timeout_s=TIMEOUT_S
    ) as client:
        start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_send(client, block, request, start))
                for request in block.requests
            ]
    return [task.result() for task in tasks]


async def _send(client: AsyncClient, block: Block, request: Planned, start: float) -> Sample:
    recording = Recording(block.variant, block.round, request.index, start, request.at_s)
    await asyncio.sleep(start + request.at_s - time.monotonic())
    recording.sending()
    try:
        async with client.stream_chat(request.messages, extra=request.fields) as stream:
            async for chunk in stream:
                recording.take(chunk)
                if len(recording.pieces_s) == request.abort_after:
                    return recording.ended(aborted=True)
    except ClientError as error:
        return recording.ended(error)
    return recording.ended()
