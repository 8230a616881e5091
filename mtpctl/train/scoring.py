"""Old log-probs from the log-prob server, beside generation."""

from __future__ import annotations

from mtpctl.logprob import LogprobServer, ScoreRequest
from mtpctl.samples import Sample


class Scoring:
    """The RL stage's `Score`: one request a sample, under the weights that are current when its turn comes."""

    def __init__(self, server: LogprobServer, temperature: float) -> None:
        self.server, self.temperature = server, temperature
        self._last = dict.fromkeys(("busy_s", "wait_s", "tokens", "requests", "stall_s"), 0.0)

    async def __call__(self, sample: Sample) -> Sample:
        """Fill in old log-probs and entropy, and the version that made them."""
        request = ScoreRequest(
            sample.prompt_ids + sample.response_ids, len(sample.prompt_ids), temperature=self.temperature, caller="train"
        )
        scored = await self.server.score(request)
        sample.old_logprobs, sample.old_entropy, sample.old_version = scored.logprobs, scored.entropy, scored.version
        return sample

    def metrics(self) -> dict[str, float]:
        """What the server did since the last call; empty where that is nothing."""
        now = {name: float(getattr(self.server.counters, name)) for name in self._last}
        passed = {name: now[name] - before for name, before in self._last.items()}
        self._last = now
        if not passed["requests"]:
            return {}
        return {
            "timing_s/logprob_server": passed["busy_s"],
            "logprob/wait_seconds": passed["wait_s"] / passed["requests"],
            "logprob/tokens_per_s": passed["tokens"] / passed["busy_s"] if passed["busy_s"] else 0.0,
            "logprob/stall_seconds": passed["stall_s"],
        }
