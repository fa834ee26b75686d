"""Tasks whose reward fails, or whose model is stopped by a rule of their own."""

import verifiers.v1 as vf


class OddConfig(vf.TasksetConfig):
    kind: str = "broken"


class Odd(vf.Task):
    @vf.reward
    async def counted(self, trace: vf.Trace) -> float:
        if self.data.name == "broken":
            raise ValueError("no reward today")
        return float(trace.num_turns)


class Odds(vf.Taskset[Odd, OddConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            data = vf.TaskData(name=self.config.kind, prompt=f"Say {number}.")
            yield Odd(data, self.config.task)
            number += 1


__all__ = ["Odds"]
