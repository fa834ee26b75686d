"""LangChain: messages, a stream, a bound tool, structured output."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict


class Verdict(BaseModel):
    """What an answer is parsed as."""

    model_config = ConfigDict(extra="forbid")

    ok: bool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = ChatOpenAI(model=sys.argv[1], max_tokens=200, temperature=0.7)
answer = model.invoke([("system", "Translate."), ("human", "I love programming.")])
chunks = list(model.stream("I love programming."))
call = model.bind_tools([add], tool_choice="any", strict=True).invoke("1 + 2?")
verdicts = [
    model.with_structured_output(Verdict, method=method).invoke("Fine?")
    for method in ("json_schema", "function_calling")
]
by_responses = ChatOpenAI(model=sys.argv[1], max_tokens=64, use_responses_api=True).invoke("Hi")
print(
    json.dumps(
        {
            "num_tokens": answer.usage_metadata["output_tokens"],
            "num_chunks": len(chunks),
            "calls": [one["name"] for one in call.tool_calls],
            "sum": add.invoke(call.tool_calls[0]).content.lstrip("-").isdigit(),
            "verdicts": [type(one).__name__ for one in verdicts],
            "responses_tokens": by_responses.usage_metadata["output_tokens"],
        }
    )
)
