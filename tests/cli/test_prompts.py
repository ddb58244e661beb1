"""Prompts outside the engine: the same tokens as upstream's server makes, and one sentence for what is no prompt."""

from __future__ import annotations

import argparse
import copy
import json
from types import SimpleNamespace

import pytest
from mlx_lm import server as upstream
from mlx_lm.utils import load_tokenizer

from mlx_lm_tiered.prompts import BadPrompt, Template, parse, tokenizer_of, tokens_of

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": [1, "x"]}'}}
CONVERSATIONS = [
    {"prompt": "Once upon a time"},
    {"messages": [{"role": "user", "content": "hello"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "9"}], "tools": TOOLS},
    {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"enable_thinking": False}},
]


def upstreams(tokenizer, body: dict, arguments: dict) -> list[int]:
    """What upstream's own code makes of a request, without a model."""
    body = copy.deepcopy(body)
    request = upstream.CompletionRequest(
        "text" if "prompt" in body else "chat", body.get("prompt", ""), body.get("messages", []), body.get("tools"), body.get("role_mapping")
    )
    provider = SimpleNamespace(processor=None, cli_args=argparse.Namespace(chat_template_args=arguments))
    args = SimpleNamespace(chat_template_kwargs=body.get("chat_template_kwargs"))
    return upstream.ResponseGenerator._tokenize(SimpleNamespace(model_provider=provider), tokenizer, request, args)[0]


@pytest.mark.parametrize("body", CONVERSATIONS, ids=["text", "user", "parts", "tools", "arguments"])
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gemma3"])
def test_the_tokens_are_upstreams(model, body, request):
    path = request.getfixturevalue(model)
    arguments = {"x": 1}
    before = copy.deepcopy(body)
    found = tokens_of(tokenizer_of(path), parse(body), Template(arguments=arguments))
    assert found == upstreams(load_tokenizer(path), body, arguments) and body == before
    assert parse(parse(body).request()[1]) == parse(body)


@pytest.mark.parametrize("body", CONVERSATIONS[1:], ids=["user", "parts", "tools", "arguments"])
def test_a_template_sees_what_upstreams_would(tiny_llama, body):
    """One that shows everything that it gets: the tiny models' own look at little."""
    dump = "{{ messages | tojson }}{{ tools | tojson }}{{ enable_thinking }}{{ add_generation_prompt }}"
    template = Template(chat_template=dump)
    tokenizer = tokenizer_of(tiny_llama, template)
    found = tokens_of(tokenizer, parse(body), template)
    assert found == upstreams(load_tokenizer(tiny_llama, {"chat_template": dump}), body, {}) and len(found) > 10
    if "tools" in body:
        assert '"arguments": {"at": [1, "x"]}' in tokenizer.decode(found)


def test_a_chat_template_of_the_servers_flags(tiny_llama):
    template = Template(chat_template="{% for m in messages %}<{{ m.content }}>{% endfor %}")
    tokenizer = tokenizer_of(tiny_llama, template)
    assert tokenizer.decode(tokens_of(tokenizer, parse(CONVERSATIONS[1]), template)) == "<hello>"
    refusing = Template(chat_template="{{ raise_exception('not so') }}")
    with pytest.raises(BadPrompt, match="not so"):
        tokens_of(tokenizer_of(tiny_llama, refusing), parse(CONVERSATIONS[1]), refusing)


@pytest.mark.parametrize("roles", [None, {"user": "U:", "assistant": "A:", "stop": "|"}])
def test_a_model_without_a_chat_template(tiny_llama, roles):
    tokenizer = load_tokenizer(tiny_llama)
    tokenizer.has_chat_template = False
    body = {"messages": [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "again"))]}
    body |= {"role_mapping": roles} if roles else {}
    assert tokens_of(tokenizer, parse(body)) == upstreams(tokenizer, body, {})


@pytest.mark.parametrize(
    ("value", "because"),
    [
        (1, "not a JSON object"),
        ({}, "either messages or a prompt"),
        ({"prompt": "a", "messages": []}, "either messages or a prompt"),
        ({"prompt": ["a"]}, "prompt is not a text"),
        ({"prompt": ""}, "prompt is not a text"),
        ({"prompt": "a", "tools": []}, "go with messages"),
        ({"messages": []}, "not a list with something in it"),
        ({"messages": [{"content": "a"}]}, "message 1 is not an object with a role"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": 7}], "message 2 has content that is not text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 1 has content that is not text"),
        ({"messages": [{"role": "user"}], "tools": {}}, "tools are not a list"),
        ({"messages": [{"role": "user"}], "temperature": 1}, "'temperature', which is not one of"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "arguments are not JSON"),
    ],
    ids=json.dumps,
)
def test_what_is_no_prompt_is_one_sentence(value, because):
    with pytest.raises(BadPrompt, match=because):
        parse(value)
