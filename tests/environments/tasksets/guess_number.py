"""A verifiers environment of several turns: the environment answers higher or lower until the number is guessed."""

from __future__ import annotations

import verifiers.v1 as vf
from last_letter import DirectHarness

TURNS = 6


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward(weight=1.0)
    async def guessed(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.number))


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> list[GuessTask]:
        return [
            GuessTask(GuessData(name=f"number {number}", system_prompt="Guess.", number=number), self.config.task) for number in range(1, 9)
        ]


class GuessConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as game:
            said = "a number from 1 to 8?"
            for _ in range(TURNS):
                segment = await game.turn(said)
                if segment.terminated or segment.last_reply == str(task.data.number):
                    return
                guess = int(segment.last_reply) if segment.last_reply.isdigit() else 0
                said = "higher" if guess < task.data.number else "lower"


__all__ = ["DirectHarness", "GuessEnv", "GuessTaskset"]
