"""Prompts outside the engine: from a request's JSON to the tokens that a server would make of it.

The rules are those of mlx-lm's server (`mlx_lm/server.py`, `ResponseGenerator._tokenize`,
`process_message_content`, `convert_chat`), the tokenizer is loaded as it loads it. A
server's own tokenizer belongs to its generation thread; here is always another one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEYS = ("prompt", "messages", "tools", "chat_template_kwargs", "role_mapping")


class BadPrompt(ValueError):
    """This is no prompt; its text is one sentence."""


@dataclass(frozen=True)
class Prompt:
    """A request's prompt: `text`, or `messages` for the chat template."""

    text: str | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    role_mapping: Mapping[str, str] | None = None

    def request(self) -> tuple[str, dict[str, Any]]:
        """(path, body) of the completion request for it."""
        if self.text is not None:
            return "/v1/completions", {"prompt": self.text}
        body: dict[str, Any] = {"messages": list(self.messages)}
        if self.tools:
            body["tools"] = list(self.tools)
        if self.template_kwargs:
            body["chat_template_kwargs"] = dict(self.template_kwargs)
        if self.role_mapping:
            body["role_mapping"] = dict(self.role_mapping)
        return "/v1/chat/completions", body


@dataclass(frozen=True)
class Template:
    """How a server makes text of messages: its flags of the same names."""

    chat_template: str | None = None
    use_default: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


def parse(value: Any) -> Prompt:
    """A prompt from JSON: ``{"prompt": "…"}``, ``{"messages": […], "tools": […]}`` or a list of messages. Raises BadPrompt."""
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise BadPrompt("it is not a JSON object")
    if unknown := sorted(set(value) - set(KEYS)):
        raise BadPrompt(f"it has {unknown[0]!r}, which is not one of {', '.join(KEYS)}")
    if ("prompt" in value) == ("messages" in value):
        raise BadPrompt("it has to have either messages or a prompt")
    if "prompt" in value:
        if not isinstance(value["prompt"], str) or not value["prompt"]:
            raise BadPrompt("its prompt is not a text")
        if len(value) > 1:
            raise BadPrompt("tools and the like go with messages")
        return Prompt(text=value["prompt"])
    return Prompt(
        messages=_messages(value["messages"]),
        tools=_tools(value.get("tools")),
        template_kwargs=_object(value, "chat_template_kwargs") or {},
        role_mapping=_object(value, "role_mapping"),
    )


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadPrompt("its messages are not a list with something in it")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadPrompt(f"message {number} is not an object with a role")
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise BadPrompt(f"message {number} has content that is not text")
        elif content is not None and not isinstance(content, str):
            raise BadPrompt(f"message {number} has content that is not text")
        _tool_calls(message, number)
    return value


def _tool_calls(message: dict[str, Any], number: int) -> None:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadPrompt(f"message {number} has tool_calls that are not a list of objects")
    for call in calls:
        function = call.get("function") or {}
        if not isinstance(function, dict):
            raise BadPrompt(f"message {number} has a tool call whose function is not an object")
        if isinstance(function.get("arguments"), str) and function["arguments"]:
            try:
                json.loads(function["arguments"])
            except ValueError:
                raise BadPrompt(f"message {number} has a tool call whose arguments are not JSON") from None


def _tools(value: Any) -> list[Any] | None:
    if value is not None and not isinstance(value, list):
        raise BadPrompt("its tools are not a list")
    return value or None


def _object(value: dict[str, Any], key: str) -> dict[str, Any] | None:
    found = value.get(key)
    if found is not None and not isinstance(found, dict):
        raise BadPrompt(f"its {key} are not an object")
    return found


def tokenizer_of(path: Path, template: Template = Template()) -> Any:
    """The tokenizer of a model's directory, as the server loads it. Takes seconds; raises what upstream raises."""
    from mlx_lm.utils import load_tokenizer

    extra: dict[str, Any] = {"trust_remote_code": template.trust_remote_code}
    if template.chat_template:
        extra["chat_template"] = template.chat_template
    tokenizer = load_tokenizer(path, extra)
    if template.use_default and tokenizer.chat_template is None:
        tokenizer.chat_template = tokenizer.default_chat_template
    return tokenizer


def tokens_of(tokenizer: Any, prompt: Prompt, template: Template = Template()) -> list[int]:
    """The tokens that a server's engine gets. Raises BadPrompt when the chat template refuses."""
    if prompt.text is not None:
        return list(tokenizer.encode(prompt.text))
    messages = _plain(prompt.messages) if tokenizer.has_chat_template else prompt.messages
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(_without_template(messages, prompt.role_mapping)))
    arguments = {**template.arguments, **prompt.template_kwargs}
    try:
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=prompt.tools, tokenize=True, **arguments)
        )
    except Exception as error:  # a template is a program, and says no in its own way
        raise BadPrompt(f"the chat template refuses it ({type(error).__name__}: {error})") from error


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the chat template gets them: content as one text, arguments of tool calls parsed."""
    plain = copy.deepcopy(list(map(dict, messages)))
    for message in plain:
        content = message.get("content")
        message["content"] = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
        for call in message.get("tool_calls") or ():
            function = call.get("function")
            if function and isinstance(arguments := function.get("arguments"), str) and arguments:
                function["arguments"] = json.loads(arguments)
    return plain


def _without_template(messages: Sequence[Mapping[str, Any]], roles: Mapping[str, str] | None) -> str:
    """Messages as the text of a model that has no chat template."""
    roles = roles or {
        "system_prompt": (
            "A chat between a curious user and an artificial intelligence "
            "assistant. The assistant follows the given rules no matter what."
        ),
        "system": "ASSISTANT's RULE: ",
        "user": "USER: ",
        "assistant": "ASSISTANT: ",
        "stop": "\n",
    }
    stop = roles.get("stop", "")
    text = "".join(f"{roles.get(m['role'], '')}{m.get('content', '')}{stop}" for m in messages)
    return (text + roles.get("assistant", "")).rstrip()


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Tokens as text, special ones too; those that are no text (images) as a mark."""
    try:
        return tokenizer.decode([token for token in tokens if token >= 0])
    except Exception as error:  # tokens of another vocabulary
        return f"({len(tokens)} tokens that this tokenizer cannot decode: {error})"
