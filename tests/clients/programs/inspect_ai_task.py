"""inspect-ai: a task of two samples, solved with a tool, scored."""

import json
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import ToolFunction, tool


@tool
def add():
    async def execute(x: int, y: int):
        """Add two numbers.

        Args:
            x: First number.
            y: Second number.
        """
        return x + y

    return execute


task = Task(
    dataset=[Sample(input="What is 1 + 1?", target="2"), Sample(input="And 2 + 2?", target="4")],
    solver=[use_tools(add(), tool_choice=ToolFunction(name="add")), generate(tool_calls="single")],
    scorer=includes(),
)
(log,) = eval(
    task,
    model=f"openai-api/tinsmith/{sys.argv[1]}",
    display="none",
    log_dir=sys.argv[2],
    max_tokens=200,
    temperature=0.7,
)
print(
    json.dumps(
        {
            "status": log.status,
            "error": str(log.error) if log.error else None,
            "roles": [message.role for message in (log.samples or [])[0].messages],
            "num_scores": len(log.results.scores) if log.results else 0,
        }
    )
)
