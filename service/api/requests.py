"""From a validated body to a request for the pipeline: what only the served model can decide."""

import secrets
from dataclasses import dataclass
from typing import Any

from service.api.client import ChatTokenizer
from service.api.errors import ApiError
from service.api.protocol import ChatBody, CompletionBody, GenerationBody
from service.messages import GenerateRequest, Sampling

# Parameters that would change the text and that are not done yet, with the values that ask for
# nothing (as null does). To ignore any other value would be a silent lie.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "min_p": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "reasoning_effort": ("none",),
}
_UINT64 = 2**64 - 1
COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind the routes."""

    model: str
    max_len: int
    tokenizer: ChatTokenizer

    def check_model(self, model: str) -> None:
        """Raises ApiError 404 for any name but the served one."""
        if model != self.model:
            raise ApiError(
                404,
                f"The model does not exist here. This server has {self.model!r}.",
                param="model",
                code="model_not_found",
            )

    def request(self, body: ChatBody | CompletionBody, request_id: str) -> GenerateRequest:
        """Raises ApiError naming the field that can't be served."""
        self.check_model(body.model)
        _refuse_unsupported(body.model_extra or {})
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true.", param="stream_options")
        prompt = tuple(
            self._chat_ids(body) if isinstance(body, ChatBody) else self._prompt_ids(body)
        )
        return GenerateRequest(
            request_id=request_id,
            prompt_ids=prompt,
            max_tokens=self._max_tokens(body, len(prompt)),
            sampling=self._sampling(body),
            stop=tuple(body.stop or ()),
        )

    def _chat_ids(self, body: ChatBody) -> list[int]:
        messages = [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": message.content,
            }
            for message in body.messages
        ]
        try:
            ids = self.tokenizer.render_chat(messages)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error
        self._check_length(len(ids), "messages")
        return ids

    def _prompt_ids(self, body: CompletionBody) -> list[int]:
        ids = self.tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        self._check_length(len(ids), "prompt")
        vocab_size = self.tokenizer.vocab_size
        if not all(0 <= token < vocab_size for token in ids):
            raise ApiError(400, f"Token ids should lie in [0, {vocab_size}).", param="prompt")
        return ids

    def _check_length(self, tokens: int, param: str) -> None:
        if tokens == 0:
            raise ApiError(400, "The prompt has no tokens.", param=param)
        if tokens >= self.max_len:
            raise ApiError(
                400,
                f"The prompt has {tokens} tokens. This model's context is {self.max_len} tokens, "
                "and at least one must be left for the answer.",
                param=param,
                code="context_length_exceeded",
            )

    def _max_tokens(self, body: GenerationBody, prompt_tokens: int) -> int:
        """What was asked for (by default all, or the 16 tokens of OpenAI's completions), or the
        rest of the context if that is less."""
        old, new = body.max_tokens, body.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ; give one.", param="max_tokens"
            )
        rest = self.max_len - prompt_tokens
        asked = old if new is None else new
        if asked is None:
            asked = COMPLETION_TOKENS if isinstance(body, CompletionBody) else rest
        return min(asked, rest)

    def _sampling(self, body: GenerationBody) -> Sampling:
        seeded = body.seed is not None
        return Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=min(max(body.top_k or 0, 0), self.tokenizer.vocab_size),
            seeded=seeded,
            key=secrets.randbits(64) if body.seed is None else body.seed & _UINT64,
        )


def _refuse_unsupported(extra: dict[str, Any]) -> None:
    for name, neutral in UNSUPPORTED.items():
        value = extra.get(name)
        if value is None:
            continue
        # By type too: `logprobs: 0` asks for something, `logprobs: false` does not.
        if not any(type(value) is type(item) and value == item for item in neutral):
            raise ApiError(400, f"{name}: This value is not supported yet.", param=name)
