"""From a body to the token ids of its prompts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from service.api.client import ChatTokenizer
from service.api.errors import ApiError
from service.api.protocol import ChatBody, ChatMessage, CompletionBody
from service.api.tooling import Tooling
from service.text.tokenizer import RESERVED_TEMPLATE_KWARGS
from service.text.tools import ToolFormat


@dataclass(frozen=True, slots=True)
class Prompt:
    """`opening` goes out ahead of the answer."""

    token_ids: tuple[int, ...]
    opening: str | None


def chat_prompt(body: ChatBody, tokenizer: ChatTokenizer, tooling: Tooling) -> Prompt:
    """Raises ApiError where the template can't take the conversation."""
    messages = template_messages(body.messages, tooling.tool_format)
    kwargs = _template_kwargs(body)
    if body.add_generation_prompt and body.continue_final_message:
        raise ApiError(
            400,
            "Either a new message begins or the last one goes on: add_generation_prompt and "
            "continue_final_message can't both be true.",
            param="continue_final_message",
        )
    if tooling.tools and not tooling.tool_format.renders_tools:
        messages = _with_instructions(messages, tooling.tool_format.instructions(tooling.tools))
    continues = body.continue_final_message is True
    try:
        token_ids = tokenizer.render_chat(
            messages,
            tools=list(tooling.tools) or None,
            add_generation_prompt=not continues and body.add_generation_prompt is not False,
            continue_final_message=continues,
            template_kwargs=kwargs,
        )
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    return Prompt(tuple(token_ids), opening="")


def text_prompts(body: CompletionBody, tokenizer: ChatTokenizer) -> list[Prompt]:
    prompts = []
    for prompt in body.prompt:
        token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        check_token_ids(token_ids, tokenizer, "prompt")
        echo = None
        if body.echo:
            echo = prompt if isinstance(prompt, str) else tokenizer.decode(token_ids)
        prompts.append(Prompt(tuple(token_ids), echo))
    return prompts


def check_token_ids(token_ids: Iterable[int], tokenizer: ChatTokenizer, param: str) -> None:
    """Raises ApiError for an id that is no token's."""
    vocab_size = tokenizer.vocab_size
    if not all(0 <= token < vocab_size for token in token_ids):
        raise ApiError(400, f"Token ids should lie in [0, {vocab_size}).", param=param)


def template_messages(
    messages: Sequence[ChatMessage], tool_format: ToolFormat
) -> list[dict[str, Any]]:
    """Messages as the model's template knows them. Raises ApiError if it can't take them."""
    try:
        return tool_format.call_messages([_plain(message) for message in messages])
    except (ValueError, RecursionError) as error:  # arguments of calls are JSON of any depth
        raise ApiError(400, str(error), param="messages") from error


def _plain(message: ChatMessage) -> dict[str, Any]:
    """`developer` is younger than most templates, and a content that is missing is more than some
    can take."""
    plain = message.model_dump(exclude_none=True)
    if message.role == "developer":
        plain["role"] = "system"
    if message.role != "assistant":
        plain.pop("tool_calls", None)
    return {**plain, "content": message.content or ""}


def _with_instructions(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Tells of the tools in the system's message."""
    first, *rest = messages
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]


def _template_kwargs(body: ChatBody) -> dict[str, Any]:
    given = body.chat_template_kwargs or {}
    for name in given:
        if name in RESERVED_TEMPLATE_KWARGS:
            message = "chat_template_kwargs has a name in it that is not the template's own."
            raise ApiError(400, message, param="chat_template_kwargs")
    effort = body.reasoning_effort
    return ({} if effort is None else {"reasoning_effort": effort}) | given
