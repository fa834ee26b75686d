"""pydantic-ai: an answer of a type, as a tool call and as a native schema, and a plain tool."""

import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput


class City(BaseModel):
    """What the agent answers with."""

    known: bool
    number: int


model = f"openai-chat:{sys.argv[1]}"
settings = {"max_tokens": 400}
by_tool = Agent(model, output_type=City, model_settings=settings).run_sync("Where is Ulm?")
native = Agent(model, output_type=NativeOutput(City), model_settings=settings).run_sync("Where?")
responses = Agent(
    f"openai-responses:{sys.argv[1]}", output_type=City, model_settings=settings
).run_sync("Where is Ulm?")
print(
    json.dumps(
        {
            "types": [type(one.output).__name__ for one in (by_tool, native, responses)],
            "num_tokens": by_tool.usage.output_tokens,
        }
    )
)
