"""A taskset whose tasks have a tool, served by a process of its own."""

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)


class CalcTask(vf.Task):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def used(self, trace: vf.Trace) -> float:
        return float(any(str(message.content) == "5" for message in trace.tool_messages))


class Calc(vf.Taskset[CalcTask]):
    def load(self) -> list[CalcTask]:
        return [CalcTask(vf.TaskData(prompt="What is 2 + 3?"), self.config.task)]


__all__ = ["Calc"]

if __name__ == "__main__":
    Calculator.run()
