"""litellm: a completion, a stream, a tool, a schema, a context that is too long."""

import json
import sys

import litellm
from pydantic import BaseModel


class Verdict(BaseModel):
    """What an answer is parsed as."""

    ok: bool


model = f"openai/{sys.argv[1]}"
messages = [{"role": "user", "content": "Hello, how are you?"}]
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_time",
            # A model that knows nothing writes properties of its own wherever it may.
            "parameters": {
                "type": "object",
                "properties": {"zone": {"type": "integer"}},
                "additionalProperties": False,
            },
        },
    }
]
answer = litellm.completion(model=model, messages=messages, max_tokens=16)
stream = litellm.completion(
    model=model,
    messages=messages,
    max_tokens=64,
    stream=True,
    extra_body={"ignore_eos": True},
)
chunks = list(stream)
called = litellm.completion(
    model=model, messages=messages, tools=tools, tool_choice="required", max_tokens=200
)
verdict = litellm.completion(
    model=model, messages=messages, response_format=Verdict, max_tokens=200
)
try:
    litellm.completion(model=model, messages=[{"role": "user", "content": "x" * 20_000}])
    problem = "none"
except litellm.ContextWindowExceededError:
    problem = "ContextWindowExceededError"
print(
    json.dumps(
        {
            "num_tokens": answer.usage.completion_tokens,
            "num_chunks": len(chunks),
            "calls": [one.function.name for one in called.choices[0].message.tool_calls or []],
            "verdict": list(json.loads(verdict.choices[0].message.content)),
            "problem": problem,
        }
    )
)
