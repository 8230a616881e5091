"""A step of vLLM's engine core, with log-probs sent with every token or only with the end of a response.

    python benchmarks/engine_core.py --requests 256

The core is real and the model runner answers immediately, so the time is what a GPU waits for if its steps are short: scheduling,
processing the sampled tokens, and encoding the message for the front end. Runs on a CPU, in one process, as the core does next to a GPU.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from harness import alternate, parser, print_environment, print_spread
from mtpctl.bench.rollout_engines import TINY, write_cycle_model

PROMPT = list(range(10, 138))


def start_engine_core(folder: Path, requests: int) -> Any:
    """An engine core with asynchronous scheduling, as on a GPU, and a model runner that takes no time."""
    import numpy as np
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    def completed(result: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    class InstantExecutor(UniProcExecutor):
        """Returns one token with its log-prob for each request."""

        def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
            self.scheduled = scheduled
            nothing = ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[])
            return completed(None if scheduled.total_num_scheduled_tokens else nothing)

        def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
            ids = list(self.scheduled.num_scheduled_tokens)
            count = len(ids)
            logprobs = LogprobsLists(np.full((count, 1), 5), np.full((count, 1), -1.0, np.float32), np.ones(count, np.int64))
            index = {request: i for i, request in enumerate(ids)}
            return completed(ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=[[5] for _ in ids], logprobs=logprobs))

    args = AsyncEngineArgs(
        model=str(folder),
        dtype="float32",
        max_num_seqs=requests,
        max_model_len=704,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        distributed_executor_backend=InstantExecutor,
    )
    config = args.create_engine_config(usage_context=UsageContext.LLM_CLASS)
    config.scheduler_config.async_scheduling = True  # vLLM disables it on a CPU.
    return EngineCore(config, InstantExecutor, log_stats=False)


def measure_step_ms(core: Any, requests: int, tokens: int, deferred: bool) -> float:
    """Mean milliseconds per step while generating responses of `tokens` tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackEncoder

    from mtpctl.rollout.vllm.patches.logprobs import DEFERRED

    for index in range(requests):
        sampling = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=dict(DEFERRED) if deferred else None,
        )
        request = EngineCoreRequest(
            request_id=f"{deferred} {index} {time.monotonic()}",
            prompt_token_ids=PROMPT,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        core.add_request(*core.preprocess_add_request(request))
    encoder, steps, began = MsgpackEncoder(), 0, time.perf_counter()
    while core.scheduler.has_requests() or core.batch_queue:
        outputs, executed = core.step_fn()
        steps += executed
        for output in (outputs or {}).values():
            encoder.encode(output)
    return 1e3 * (time.perf_counter() - began) / steps


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--requests", type=int, default=256)
    arguments.add_argument("--tokens", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from mtpctl.rollout.vllm.plugin import install

    install()
    with tempfile.TemporaryDirectory() as scratch:
        core = start_engine_core(write_cycle_model(Path(scratch), TINY, acceptance=0.75, device="cpu"), options.requests)
        ways = {
            "with every token": lambda: measure_step_ms(core, options.requests, options.tokens, False),
            "with the end of a response": lambda: measure_step_ms(core, options.requests, options.tokens, True),
        }
        times = alternate(ways, options.rounds)
        core.shutdown()
    print_environment()
    for name, step_times in times.items():
        print_spread(f"log-probs {name}", step_times, f"ms a step, {options.requests} requests")


if __name__ == "__main__":
    main()
