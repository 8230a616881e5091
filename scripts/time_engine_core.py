"""Times a step of vLLM's engine core, log-probs sent with every token and with the end of a response: `python scripts/time_engine_core.py`.

The core is real, the model runner answers at once, so what is timed is what a card waits for where a step is short: scheduling, taking
the sampled tokens in, and packing the message for the front end. It runs on a CPU, and is one process, as the core is beside a card.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}

import numpy as np
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackEncoder

from mtpctl.bench.cycle_model import write_cycle_model
from mtpctl.bench.rollout_engines import TINY
from mtpctl.rollout.vllm.patches.logprobs import DEFERRED

PROMPT = list(range(10, 138))


class Instant(UniProcExecutor):
    """Samples a token for each request, with its log-prob, in no time."""

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
        self.scheduled = scheduled
        return _done(
            None if scheduled.total_num_scheduled_tokens else ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[])
        )

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        ids = list(self.scheduled.num_scheduled_tokens)
        count = len(ids)
        rows = LogprobsLists(np.full((count, 1), 5), np.full((count, 1), -1.0, np.float32), np.ones(count, np.int64))
        index = {each: number for number, each in enumerate(ids)}
        return _done(ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=[[5] for _ in ids], logprobs=rows))


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def core_of(folder: Path, requests: int) -> EngineCore:
    """An engine core that schedules a step while the one before it runs, as on a card."""
    args = AsyncEngineArgs(
        model=str(folder), dtype="float32", max_num_seqs=requests, max_model_len=704, kv_cache_memory_bytes=1 << 30, enforce_eager=True,
        skip_tokenizer_init=True, disable_log_stats=True, logprobs_mode="processed_logprobs", generation_config="vllm",
        distributed_executor_backend=Instant,
    )  # fmt: skip
    config = args.create_engine_config(usage_context=UsageContext.LLM_CLASS)
    # vLLM turns it off on a CPU.
    config.scheduler_config.async_scheduling = True
    return EngineCore(config, Instant, log_stats=False)


def milliseconds(core: EngineCore, requests: int, tokens: int, late: bool) -> float:
    """Of a step, in the mean over responses of `tokens` tokens."""
    for number in range(requests):
        sampling = SamplingParams(
            max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0, flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY, extra_args=dict(DEFERRED) if late else None,
        )  # fmt: skip
        asked = EngineCoreRequest(
            request_id=f"{late} {number} {time.monotonic()}", prompt_token_ids=PROMPT, mm_features=None, sampling_params=sampling,
            pooling_params=None, arrival_time=time.time(), lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        core.add_request(*core.preprocess_add_request(asked))
    encoder, steps, began = MsgpackEncoder(), 0, time.perf_counter()
    while core.scheduler.has_requests() or core.batch_queue:
        outputs, executed = core.step_fn()
        steps += executed
        for each in (outputs or {}).values():
            encoder.encode(each)
    return 1e3 * (time.perf_counter() - began) / steps


def main() -> None:
    """Both ways in turn, after one round that warms up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    told = parser.parse_args()
    from mtpctl.rollout.vllm.plugin import install

    install()
    found: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as scratch:
        core = core_of(write_cycle_model(Path(scratch), TINY, acceptance=0.75, device="cpu"), told.requests)
        for number in range(-1, told.rounds):
            for late, times in found.items():
                spent = milliseconds(core, told.requests, told.tokens, late)
                if number >= 0:
                    times.append(spent)
        core.shutdown()
    for late, times in found.items():
        name = "with the end of a response" if late else "with every token"
        print(f"log-probs {name}: {statistics.median(times):.2f} ms a step ({min(times):.2f} - {max(times):.2f}), {told.requests} requests")


if __name__ == "__main__":
    main()
