"""Callbacks of TRL's trainers: a line of output per update, and held-out rows for the asynchronous trainer, which has no evaluation."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from typing import Any

from peer_reward import record, value
from transformers import TrainerCallback

SECONDS_OF_AN_EVALUATION = 600.0


class Updates(TrainerCallback):
    """Prints `step:N` with the times that TRL logs, summed over the optimizer steps of an update, for measure.py."""

    def __init__(self, minibatches: int) -> None:
        self.minibatches = minibatches
        self.times: Counter[str] = Counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> None:
        if not logs or "loss" not in logs:
            return
        times = {name: logged for name, logged in logs.items() if name == "step_time" or (name.startswith("perf/") and name.endswith("_s"))}
        self.times.update(
            {name.removeprefix("perf/"): logged for name, logged in times.items() if logged is not None and "tok_s" not in name}
        )
        if state.global_step % self.minibatches == 0:
            parts = [f"timing_s/{name}:{seconds:.4f}" for name, seconds in self.times.items()]
            print(" - ".join([f"step:{state.global_step // self.minibatches}", *parts]), flush=True)
            self.times.clear()


class HeldOut(TrainerCallback):
    """Samples each held-out row once from the server, before training and every `every` optimizer steps. Training waits for it."""

    def __init__(self, rows: list[dict[str, Any]], tokenizer: Any, url: str, model: str, *, every: int, max_tokens: int, log: str) -> None:
        self.rows, self.url, self.every, self.log = rows, url, every, log
        self.payload = {
            "model": model,
            "prompt": [
                tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"] for row in rows
            ],
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "return_token_ids": True,
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._evaluate()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step % self.every == 0:
            self._evaluate()

    def _evaluate(self) -> None:
        body, headers = json.dumps(self.payload).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=SECONDS_OF_AN_EVALUATION) as response:
            choices = json.load(response)["choices"]
        for choice in choices:
            row = self.rows[choice["index"]]
            record(self.log, row["split"], row["key"], row["in_training"], len(choice["token_ids"]), value(choice["text"], row["answer"]))
