"""The engine's n-gram speculator, which a recipe sets by `rollout.speculation.method`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from mtpctl.samples import Sample
from tests.fakes.engine_checkpoints import cycle_tensors, reference_logprobs, tiny_config, write_checkpoint

CONFIG = tiny_config(vocab_size=32, num_hidden_layers=1, intermediate_size=64)


def test_ngram_drafts_are_counted_and_leave_the_logprobs_of_the_policy(tmp_path: Path) -> None:
    tensors = cycle_tensors(CONFIG, 4, 4)
    command = [sys.executable, "-m", "tests.fakes.ngram", str(write_checkpoint(tmp_path, CONFIG, tensors))]
    # Compiling the search takes longer than the response.
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    sample = Sample.from_dict(json.loads(done.stdout.splitlines()[-1]))
    # The toy counts in steps of 4 modulo 32, so its ninth token repeats the first one, and every draft is right from then on.
    assert sample.response_ids.tolist() == [(5 + 4 * place) % 32 for place in range(1, 61)]
    counts = sample.speculation
    assert counts.drafted == counts.accepted > 20 and counts.steps < 45
    wanted = reference_logprobs(CONFIG, tensors, [*sample.prompt_ids, *sample.response_ids])[1:]
    torch.testing.assert_close(torch.tensor(sample.behaviour_logprobs, dtype=torch.float64), wanted, atol=1e-5, rtol=0)
