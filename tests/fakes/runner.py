"""A fake vLLM worker whose steps take a configured time, as on a GPU, and whose tokens have no meaning."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

TOKEN = 5
STEP_S = "FIXED_STEP_S"
"""Variable with the seconds of a step that only decodes; one that prefills prompts takes twice as long."""
LOG = "FIXED_STEP_LOG"
"""Variable with a folder where each worker writes a line a step: requests, and those of them whose prompt is taken in."""


class Later(AsyncModelRunnerOutput):
    def __init__(self, due: float, output: ModelRunnerOutput) -> None:
        self.due, self.output = due, output

    def get_output(self) -> ModelRunnerOutput:
        time.sleep(max(0.0, self.due - time.perf_counter()))
        return self.output


class FixedWorker(CPUWorker):
    due = 0.0

    def compile_or_warm_up_model(self, *args: Any, **options: Any) -> CompilationTimes:
        self.log = (Path(os.environ[LOG]) / str(os.getpid())).open("w", buffering=1)
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduled: Any) -> ModelRunnerOutput | None:
        self.tokens = dict(scheduled.num_scheduled_tokens)
        return None if self.tokens else ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[])

    def sample_tokens(self, grammar: Any) -> Later:
        ids = list(self.tokens)
        prompts, count = sum(tokens > 1 for tokens in self.tokens.values()), len(ids)
        self.log.write(f"{count} {prompts}\n")
        self.due = max(self.due, time.perf_counter()) + float(os.environ[STEP_S]) * (2 if prompts else 1)
        rows = LogprobsLists(np.full((count, 1), TOKEN), np.full((count, 1), -1.0, np.float32), np.ones(count, np.int64))
        index = {each: number for number, each in enumerate(ids)}
        return Later(self.due, ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=[[TOKEN]] * count, logprobs=rows))
