"""Old log-probs from the log-prob server, beside generation."""

from __future__ import annotations

from mtpctl.logprob.protocol import Late, ScoreRequest
from mtpctl.logprob.server import LogprobServer
from mtpctl.samples import Sample

ATTEMPTS = 2
"""Times that a sample is asked for: once more where the answer is late, since a replica may have died, or a queue been long."""


class Scoring:
    """The RL stage's `Score`: one request a sample, under the weights that are current when its turn comes."""

    def __init__(self, server: LogprobServer, temperature: float, deadline_s: float = 600.0) -> None:
        """`deadline_s`: how long one answer may take, waiting included."""
        self.server, self.temperature, self.deadline_s = server, temperature, deadline_s
        self._last = dict.fromkeys(("busy_s", "wait_s", "tokens", "requests", "stall_s"), 0.0)
        self._late, self._left = 0, 0

    async def __call__(self, sample: Sample) -> Sample:
        """Fill in old log-probs, and the version that made them.

        A sample whose answers were late `ATTEMPTS` times goes on without: the trainer computes its old log-probs with the batch's.
        """
        request = ScoreRequest(
            sample.prompt_ids + sample.response_ids,
            len(sample.prompt_ids),
            temperature=self.temperature,
            caller="train",
            deadline_s=self.deadline_s,
        )
        for _ in range(ATTEMPTS):
            try:
                scored = await self.server.score(request)
            except Late:
                self._late += 1
                continue
            sample.old_logprobs, sample.old_version = scored.logprobs, scored.version
            return sample
        self._left += 1
        return sample

    def metrics(self) -> dict[str, float]:
        """What the server did since the last call; empty where that is nothing."""
        now = {name: float(getattr(self.server.counters, name)) for name in self._last}
        passed = {name: now[name] - before for name, before in self._last.items()}
        self._last = now
        late, left = self._late, self._left
        self._late = self._left = 0
        if not passed["requests"] and not late:
            return {}
        metrics = {
            "timing_s/logprob_server": passed["busy_s"],
            "logprob/tokens_per_s": passed["tokens"] / passed["busy_s"] if passed["busy_s"] else 0.0,
            "logprob/stall_seconds": passed["stall_s"],
            "logprob/late": float(late),
            "logprob/left_to_trainer": float(left),
        }
        if passed["requests"]:
            metrics["logprob/wait_seconds"] = passed["wait_s"] / passed["requests"]
        return metrics
