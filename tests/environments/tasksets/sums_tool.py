"""An environment of verifiers with a tool: a sum, which a tool server adds up. It is played by verifiers' own harness `null`."""

from __future__ import annotations

import verifiers.v1 as vf


class SumsToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, first: int, second: int) -> str:
        """Add two numbers."""
        return str(first + second)


class SumsData(vf.TaskData):
    answer: str


class SumsTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumsTask(vf.Task[SumsData, vf.State, SumsTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumsTaskConfig) -> list[vf.Toolset]:
        return [SumsToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class SumsConfig(vf.TasksetConfig):
    task: SumsTaskConfig = SumsTaskConfig()


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> list[SumsTask]:
        return [SumsTask(SumsData(prompt=f"{n}+{n + 1}=", answer=str(2 * n + 1)), self.config.task) for n in range(10, 18)]


__all__ = ["SumsTaskset"]

if __name__ == "__main__":
    SumsToolset.run()
