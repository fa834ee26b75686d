"""openai-agents: an agent calls a tool, reads its output, and answers; by both of OpenAI's APIs."""

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from pydantic import BaseModel


class Verdict(BaseModel):
    """What the second agent answers with."""

    ok: bool


asked = []


@function_tool
def get_weather(day: int, unit: int) -> str:
    """Return the weather of a day."""
    asked.append((day, unit))
    return f"sunny on {day}"


async def main() -> None:
    model = sys.argv[1]
    set_tracing_disabled(True)
    for api in ("responses", "chat_completions"):
        set_default_openai_api(api)
        agent = Agent(
            name="Assistant",
            instructions="You are a helpful assistant.",
            model=model,
            tools=[get_weather],
            model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False),
        )
        asked.clear()
        result = await Runner.run(agent, "What is the weather?")
        kinds = [item.type for item in result.new_items]
        streamed = Runner.run_streamed(agent, "What is the weather?")
        async for _ in streamed.stream_events():
            pass
        judge = Agent(name="Judge", model=model, output_type=Verdict)
        verdict = await Runner.run(judge, "Is it fine?")
        print(
            json.dumps(
                {
                    "api": api,
                    "kinds": kinds,
                    "streamed_kinds": [item.type for item in streamed.new_items],
                    "num_asked": len(asked),
                    "is_verdict": isinstance(verdict.final_output, Verdict),
                }
            )
        )


asyncio.run(main())
