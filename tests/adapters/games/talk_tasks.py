"""An environment of several turns: it answers as the user, until a number is found."""

import verifiers.v1 as vf


class TalkTask(vf.Task):
    @vf.reward
    async def guessed(self, trace: vf.Trace) -> float:
        return float("7" in trace.last_reply)


class Talk(vf.Taskset[TalkTask]):
    def load(self) -> list[TalkTask]:
        return [TalkTask(vf.TaskData(prompt="Guess a number."), self.config.task)]


class TalkEnv(vf.SingleAgentEnv):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated and "7" not in said.last_reply:
                said = await talk.turn(f"No, not {said.last_reply}.")


__all__ = ["Talk", "TalkEnv"]
