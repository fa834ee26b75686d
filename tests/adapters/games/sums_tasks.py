"""A taskset of sums: one turn, two rewards and a metric; and its environment of ours."""

from collections.abc import Iterator

import verifiers.v1 as vf

from tinsmith.environments.adapters.verifiers import VerifiersEnvironment


class SumData(vf.TaskData):
    answer: str = ""


class SumsConfig(vf.TasksetConfig):
    split: str = "train"


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return 0.5 if len(trace.last_reply) < 5 else 0.0

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        start = 0 if self.config.split == "train" else 100
        for number in range(start, start + 4):
            data = SumData(prompt=f"{number} + 1 = ?", system_prompt="Add.", answer=str(number + 1))
            yield SumTask(data, self.config.task)


class SumsEnvironment(VerifiersEnvironment):
    """Sums, without arguments."""

    env_id = "sums_tasks"


__all__ = ["Sums"]
