"""From a validated body to requests for the pipeline: what only the served model can decide."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from service.api.choices import Choice
from service.api.client import AnswerGrammars, ChatTokenizer
from service.api.errors import ApiError
from service.api.logprobs import TokenNames
from service.api.prompts import Prompt, chat_prompt, check_token_ids, text_prompts
from service.api.protocol import MAX_CHOICES, ChatBody, CompletionBody
from service.api.tooling import Tooling, answer_grammar
from service.messages import GenerateRequest, Grammar, Sampling, Stopping
from service.text.tools import ToolFormat

Body = ChatBody | CompletionBody

# Parameters of OpenAI or vLLM that would change the answer, with the values that ask for nothing
# (as null does). To ignore any other value would be a silent lie.
UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tools": ([],),  # these three: of completions
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
    "echo": (False,),  # of chats
    "best_of": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "structured_outputs": ({},),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
COMPLETION_TOKENS = 16
_KEYS = 2**64
_KEY_STEP = 0x9E3779B97F4A7C15  # large and odd: the choices of small seeds share no keys


@dataclass(slots=True)
class Served:
    """The model behind the routes."""

    model: str
    max_len: int
    tokenizer: ChatTokenizer
    grammars: AnswerGrammars
    speculation_switch: bool = True  # whether a request may do without drafts
    names: TokenNames = field(init=False)
    tool_format: ToolFormat = field(init=False)

    def __post_init__(self) -> None:
        self.names = TokenNames(self.tokenizer, self.grammars)
        self.tool_format = ToolFormat.of(self.tokenizer.chat_template, self.tokenizer.added_tokens)

    def check_model(self, model: str) -> None:
        """Raises ApiError 404 for any name but the served one."""
        if model != self.model:
            raise ApiError(
                404,
                f"The model does not exist here. This server has {self.model!r}.",
                param="model",
                code="model_not_found",
            )

    def _check_speculation(self, body: Body) -> None:
        if body.speculation is False and not self.speculation_switch:
            raise ApiError(
                400,
                "speculation: This server does not let requests turn it off.",
                param="speculation",
            )

    def choices(self, body: Body, request_id: str) -> list[Choice]:
        """The choices of the answer, those of one prompt together.

        Raises ApiError naming the field that can't be served.
        """
        self.check_model(body.model)
        _refuse_unsupported(body.model_extra or {})
        self._check_speculation(body)
        _check_together(body)
        tooling = Tooling(self.tool_format)
        if isinstance(body, ChatBody):
            tooling = Tooling.of(body, self.tool_format)
        prompts = self._prompts(body, tooling)
        grammar = answer_grammar(body.response_format, tooling, self.grammars)
        # An answer in a format of its own has no room for calls.
        has_calls = bool(tooling.tools) and (grammar is None or tooling.must_call)
        choices: list[Choice] = []
        for prompt in prompts:
            request = self._request(body, prompt, grammar)
            for turn in range(body.n or 1):
                index = len(choices)
                choice = Choice(
                    index=index,
                    request=replace(
                        request,
                        request_id=f"{request_id}-{index}",
                        sampling=replace(request.sampling, key=_key(body.seed, turn)),
                    ),
                    leads=turn == 0,
                    opening=prompt.opening,
                    mute=body.max_tokens == 0,
                    parser=tooling.parser() if has_calls else None,
                    one_call=not tooling.parallel,
                )
                choices.append(choice)
        return choices

    def _prompts(self, body: Body, tooling: Tooling) -> list[Prompt]:
        if isinstance(body, ChatBody):
            param, prompts = "messages", [chat_prompt(body, self.tokenizer, tooling)]
        else:
            param, prompts = "prompt", text_prompts(body, self.tokenizer)
        for prompt in prompts:
            tokens = len(prompt.token_ids)
            if tokens == 0:
                raise ApiError(400, "The prompt has no tokens.", param=param)
            if tokens >= self.max_len:
                raise ApiError(
                    400,
                    f"The prompt has {tokens} tokens. This model's context is {self.max_len} "
                    "tokens, and at least one must be left for the answer.",
                    param=param,
                    code="context_length_exceeded",
                )
        return prompts

    def _request(self, body: Body, prompt: Prompt, grammar: Grammar | None) -> GenerateRequest:
        """Without the id and the key, in which the choices of a prompt differ."""
        logprobs = _logprobs(body)
        max_tokens = _max_tokens(body, self.max_len - len(prompt.token_ids))
        return GenerateRequest(
            request_id="",
            prompt_ids=prompt.token_ids,
            max_tokens=max(1, max_tokens),  # the pipeline has to run for an echo too
            sampling=self._sampling(body),
            stop=self._stop(body, max_tokens),
            grammar=grammar,
            logprobs=logprobs,
            prompt_logprobs=_echoes(body) and logprobs is not None,
            speculates=body.speculation is not False,
            shows_pipeline=_shows_pipeline(body),
        )

    def _sampling(self, body: Body) -> Sampling:
        bias = body.logit_bias or {}
        check_token_ids(bias, self.tokenizer, "logit_bias")
        return Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=min(max(body.top_k or 0, 0), self.tokenizer.vocab_size),
            min_p=body.min_p or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            logit_bias=tuple(bias.items()),
            seeded=body.seed is not None,
        )

    def _stop(self, body: Body, max_tokens: int) -> Stopping:
        token_ids = dict.fromkeys(body.stop_token_ids or ())
        check_token_ids(token_ids, self.tokenizer, "stop_token_ids")
        min_tokens = body.min_tokens or 0
        if min_tokens > max_tokens:
            message = f"min_tokens is more than the {max_tokens} tokens that the answer may have."
            raise ApiError(400, message, param="min_tokens")
        return Stopping(
            strings=tuple(body.stop or ()),
            token_ids=tuple(token_ids),
            include_in_text=body.include_stop_str_in_output is True,
            min_tokens=min_tokens,
            ignore_eos=body.ignore_eos is True,
        )


def _echoes(body: Body) -> bool:
    return isinstance(body, CompletionBody) and body.echo is True


def _shows_pipeline(body: Body) -> bool:
    return body.stream_options is not None and body.stream_options.include_pipeline is True


def _logprobs(body: Body) -> int | None:
    """How many alternatives each token comes with; None for no log-probabilities."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    return (body.top_logprobs or 0) if body.logprobs else None


def _max_tokens(body: Body, room: int) -> int:
    """What was asked for (by default all, or the 16 tokens of OpenAI's completions), or the room
    that the context has if that is less."""
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked is None:
        asked = COMPLETION_TOKENS if isinstance(body, CompletionBody) else room
    return min(asked, room)


def _key(seed: int | None, turn: int) -> int:
    """Where the randomness of a prompt's choice comes from. The first one's is that of a request
    for one choice."""
    if seed is None:
        return secrets.randbits(64)
    return (seed + turn * _KEY_STEP) % _KEYS


def _check_together(body: Body) -> None:
    """Raises ApiError for fields that exclude each other."""
    n = body.n or 1
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true.", param="stream_options")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(
            400, "max_tokens and max_completion_tokens differ; give one.", param="max_tokens"
        )
    if body.max_tokens == 0 and not _echoes(body):
        raise ApiError(400, "max_tokens: 0 is for completions with echo.", param="max_tokens")
    if isinstance(body, ChatBody):
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
        return
    if body.best_of not in (None, 1, n):
        raise ApiError(400, "best_of can only be n.", param="best_of")
    if len(body.prompt) * n > MAX_CHOICES:
        raise ApiError(
            400,
            f"These are {len(body.prompt) * n} choices, prompts times n; {MAX_CHOICES} are the "
            "most.",
            param="prompt" if n == 1 else "n",
        )


def _refuse_unsupported(extra: dict[str, Any]) -> None:
    for name, neutral in UNSUPPORTED.items():
        value = extra.get(name)
        if value is None:
            continue
        # By type too: `echo: 0` may mean something, `echo: false` does not.
        if not any(type(value) is type(item) and value == item for item in neutral):
            raise ApiError(400, f"{name}: This value is not supported.", param=name)
