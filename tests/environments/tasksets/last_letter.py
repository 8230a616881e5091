"""A verifiers environment of one turn: the last letter of a word. Its harness calls the model in the process that runs the episode."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire

WORDS = {"train": ("bread", "tiger", "lemon", "cloud", "paper", "music", "river", "stone"), "test": ("glass", "piano", "wheat")}


class LastLetterData(vf.TaskData):
    answer: str


class LastLetterTask(vf.Task[LastLetterData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= 2)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LastLetterConfig(vf.TasksetConfig):
    split: str = "train"
    endless: bool = False


class LastLetterTaskset(vf.Taskset[LastLetterTask, LastLetterConfig]):
    @property
    def bounded(self) -> bool:
        return not self.config.endless

    def load(self) -> Iterator[LastLetterTask]:
        words = WORDS[self.config.split]
        while True:
            for word in words:
                yield LastLetterTask(LastLetterData(prompt=f"last letter of {word}:", answer=word[-1]), self.config.task)
            if not self.config.endless:
                return


class DirectHarnessConfig(vf.HarnessConfig):
    fails: bool = False


class DirectHarness(vf.Harness[DirectHarnessConfig]):
    """Sends one request per segment, and starts no process for it."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        if self.config.fails:
            raise OSError("the harness is broken")
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_to_wire(each) for each in prompt or []]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")


__all__ = ["DirectHarness", "LastLetterTaskset"]
