"""A program written for OpenAI's API, with OpenAI's own client."""

import json

import openai
import pytest

from support import scripted
from support.models import document
from support.server import tiered

CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


def cached(usage):
    return usage.prompt_tokens_details.cached_tokens


def test_chat_stream_and_cached_tokens(tiny_llama, cache_dir, tmp_path):
    messages = [{"role": "user", "content": document(2000)}]
    ask = dict(model="default_model", messages=messages, max_tokens=12, temperature=0)
    with tiered(tiny_llama, cache_dir, log=tmp_path / "first.log") as server:
        answer = client(server).chat.completions.create(**ask)
        assert cached(answer.usage) == 0 and answer.choices[0].message.content
        chunks = list(client(server).chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == answer.choices[0].message.content
        assert cached(chunks[-1].usage) == answer.usage.prompt_tokens - 1
        assert server.terminate() == 0
    with tiered(tiny_llama, cache_dir, log=tmp_path / "second.log") as server:
        again = client(server).chat.completions.create(**ask)
        assert again.choices[0].message.content == text
        assert cached(again.usage) == again.usage.prompt_tokens - 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_used_and_its_result_continues_from_the_cache(cache_dir, tmp_path, stream):
    model = scripted.write(
        tmp_path / "model",
        {"<|after_user|>": ["<tool_call>", CALL, "</tool_call>"], "<|after_tool|>": ["It is sunny in Paris."]},
    )
    messages = [{"role": "user", "content": "What is the weather in Paris? " + document(400)}]
    ask = dict(model="default_model", tools=[TOOL], max_tokens=12, temperature=0)
    with tiered(model, cache_dir, log=tmp_path / "log") as server:
        if stream:
            deltas = [c.choices[0] for c in client(server).chat.completions.create(messages=messages, stream=True, **ask)]
            call = next(d.delta.tool_calls[0] for d in deltas if d.delta.tool_calls)
            assert deltas[-1].finish_reason == "tool_calls"
            prompt = None
        else:
            answer = client(server).chat.completions.create(messages=messages, **ask)
            call = answer.choices[0].message.tool_calls[0]
            assert answer.choices[0].finish_reason == "tool_calls"
            prompt = answer.usage.prompt_tokens
        assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}
        messages += [
            {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": call.function.model_dump()}]},
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        answer = client(server).chat.completions.create(messages=messages, **ask)
        assert answer.choices[0].message.content == "It is sunny in Paris."
        assert cached(answer.usage) > (prompt or 100) * 0.8


def test_errors_reach_the_client_as_errors(tiny_llama, cache_dir, tmp_path):
    with tiered(tiny_llama, cache_dir, log=tmp_path / "log") as server:
        with pytest.raises(openai.BadRequestError):
            client(server).chat.completions.create(model="default_model", messages=[{"role": "user", "content": "hi"}], temperature=-1)
        answer = client(server).chat.completions.create(
            model="default_model", messages=[{"role": "user", "content": "hi"}], max_tokens=2
        )
        assert answer.usage.completion_tokens == 2
