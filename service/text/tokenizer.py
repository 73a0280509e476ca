"""The tokenizer of a target: text and chats to token ids, ids to text. Needs no network."""

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from service.config import ConfigError

# Any of these is a vocabulary. Without one, transformers may make up an empty tokenizer.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")

# What a template's variables must not be called: the arguments of transformers on the way there.
RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


class NoChatTemplate(ValueError):  # noqa: N818 - it names a fact about the model, not a fault
    """The model can't chat: its folder has no chat template."""


class ChatTemplateError(ValueError):
    """The chat template refused the messages. Holds the template's own words."""


class Tokenizer:
    """A thin, typed cover of a transformers tokenizer."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Loads the tokenizer of a Hugging Face folder. Raises ConfigError if there is none."""
        if not any((folder / name).is_file() for name in _VOCABULARIES):
            raise ConfigError(
                f"The model folder {folder} has no tokenizer: it should hold tokenizer.json "
                f"(or one of {', '.join(_VOCABULARIES[1:])})."
            )
        from transformers import AutoTokenizer  # seconds to import: not before it is needed

        try:
            hf = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers' loaders share no base class of errors
            raise ConfigError(f"The tokenizer of {folder} can't be loaded: {error}") from error
        return cls(hf)

    @property
    def vocab_size(self) -> int:
        """Token ids that have a text, special ones included. The target's head may be wider."""
        return len(self._hf)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end token. A target may have more (`service.target`)."""
        token_id: int | None = self._hf.eos_token_id
        return token_id

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """The tokens that are never split, special ones and others, with their ids."""
        added: dict[str, int] = self._hf.get_added_vocab()
        return added

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. `add_special_tokens`: with the BOS that the model expects, if any."""
        ids: list[int] = self._hf.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens. Bytes that are no UTF-8 come out as U+FFFD."""
        text: str = self._hf.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def to_json(self) -> str | None:
        """What tokenizer.json holds, without a limit of length; None for kinds that have none."""
        backend = getattr(self._hf, "backend_tokenizer", None)
        if backend is None:
            return None
        backend = copy(backend)
        backend.no_truncation()
        text: str = backend.to_str()
        return text

    @property
    def chat_template(self) -> str | None:
        """The program that writes conversations. Of several, the one for tools."""
        template: str | dict[str, str] | None = self._hf.chat_template
        if isinstance(template, dict):
            return template.get("tool_use", template.get("default"))
        return template

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """The prompt ids of a chat, up to where the assistant's answer begins, or where the last
        message is to be continued. `template_kwargs` are for the template; none of them is in
        RESERVED_TEMPLATE_KWARGS.

        The template writes its special tokens itself, so none are added. Raises NoChatTemplate, or
        ChatTemplateError when the template can't take these messages.
        """
        try:
            self._hf.get_chat_template()
        except ValueError as error:
            raise NoChatTemplate(
                "This model has no chat template. Send a prompt to /v1/completions instead."
            ) from error
        try:
            ids: list[int] = self._hf.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=True,
                return_dict=False,
                **template_kwargs,
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise ChatTemplateError(
                f"The model's chat template refuses these messages: {error}"
            ) from error
        return ids
