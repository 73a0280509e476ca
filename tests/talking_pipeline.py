"""A pipeline that says what a test wants, by the real scheduler: every event is true."""

import asyncio
import sys
from collections.abc import AsyncGenerator

import uvicorn

from service.api.client import PipelineStatus, PipelineUnavailableError
from service.engine.scheduler import Scheduler
from service.messages import CyclePlan, Event, Failure, GenerateRequest, Verdict, Verify
from service.text.stream import TextStream
from tests.api_server import make_api
from tests.fake_pipeline import FakeTokenizer
from tests.token_pipeline import TokenPipeline

END = 0xE000  # without a text
MAX_LEN = 4096


class Recital(TokenPipeline):
    """The target's tokens are the code points of a text, and then the end. Of three drafts one is
    wrong."""

    def __init__(self, stages: int, text: str) -> None:
        super().__init__(stages, 1, MAX_LEN, self._draft)
        self.text = [*map(ord, text), END]

    def _token(self, slot: int, position: int) -> int:
        place = position - self.prompt_lengths[slot]
        return self.text[place] if place < len(self.text) else END

    def _draft(self, slot: int, position: int) -> int:
        return self._token(slot, position) if position % 3 else ord("#")

    def _verdict(self, _plan: CyclePlan, order: Verify) -> Verdict:
        token = self._token(order.slot, order.position)
        accepted = None if order.proposal is None else order.proposal.token == token
        return Verdict(order.slot, order.position, token, accepted)


class TalkingPipeline:
    """Answers any request with `reply`, one cycle every `pause_s`. While it `holds`, no answer
    goes on behind its first ten tokens. `error`: it can't be reached. `breaks`: it fails there."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.stages = 2
        self.reply = "Hello."
        self.pause_s = 0.0
        self.holds = False
        self.error: str | None = None
        self.breaks = False
        self.requests: list[GenerateRequest] = []
        self.open = 0
        self.is_ready = True

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        if self.error is not None:
            raise PipelineUnavailableError(self.error)
        scheduler = Scheduler(
            stages=self.stages,
            slots=1,
            max_len=MAX_LEN,
            chunk=16,
            eos_ids=frozenset({END}),
            new_text=lambda request: TextStream(FakeTokenizer().decode, request.stop),
            uses_pdm=True,
        )
        graph = Recital(self.stages, self.reply)
        scheduler.add(request, lambda _: None)
        self.open += 1
        tokens = 0
        try:
            while (plan := scheduler.plan()) is not None:
                await asyncio.sleep(self.pause_s)
                for _, event in scheduler.apply(graph.run(plan)):
                    tokens += 1
                    yield event
                if self.breaks and tokens >= 10:
                    yield Failure("a stage is gone")
                    return
                while self.holds and tokens >= 10:
                    await asyncio.sleep(0.01)
        finally:
            self.open -= 1

    async def status(self) -> PipelineStatus:
        if not self.is_ready:
            return PipelineStatus(False, "starting", "off")
        return PipelineStatus(True, "serving", "pdm")


def main() -> None:
    """Serves on the given port, in a process that can be killed."""
    pipeline = TalkingPipeline()
    pipeline.reply, pipeline.holds = "Hello, here I am.", len(sys.argv) > 2
    app = make_api(pipeline, max_len=MAX_LEN)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")


if __name__ == "__main__":
    main()
