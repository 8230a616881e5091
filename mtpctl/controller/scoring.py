"""Old log-probs from the log-prob server, while other samples are generated."""

from __future__ import annotations

from mtpctl.logprob.placed import ATTEMPTS
from mtpctl.logprob.protocol import Late, ScoreRequest
from mtpctl.logprob.server import LogprobServer
from mtpctl.recipe.train import Replay
from mtpctl.samples import Sample


class Scoring:
    """The `Score` of the RL stage: one request a sample, answered under the weights that the server has at that time."""

    def __init__(self, server: LogprobServer, temperature: float, deadline_s: float = 600.0, *, replay: Replay = "off") -> None:
        """`deadline_s`: seconds that one answer may take, those in the queue included. `replay`: `train.moe.replay`."""
        self.server, self.temperature, self.deadline_s, self.replay = server, temperature, deadline_s, replay
        self._last = dict.fromkeys(("busy_s", "wait_s", "tokens", "requests", "stall_s"), 0.0)
        self._late, self._unscored = 0, 0

    async def __call__(self, sample: Sample) -> Sample:
        """Fill in the old log-probs of a sample, the weight version that they were computed with, and the routes if they are its.

        After `ATTEMPTS` late answers the sample is returned without: the trainer computes its old log-probs at the update.
        """
        request = ScoreRequest(
            sample.token_ids,
            len(sample.prompt_ids),
            temperature=self.temperature,
            caller="train",
            deadline_s=self.deadline_s,
            routes=sample.routes if self.replay == "rollout" else None,
            record=self.replay == "recompute",
            name=sample.name,
        )
        for _ in range(ATTEMPTS):
            try:
                scored = await self.server.score(request)
            except Late:
                self._late += 1
                continue
            sample.old_logprobs, sample.old_version = scored.logprobs, scored.version
            if request.record and scored.routes is not None:
                # A copy: Ray's array is a view into its object store, and keeps the whole batch's answer there.
                sample.routes = scored.routes.copy()
            return sample
        self._unscored += 1
        return sample

    def metrics(self) -> dict[str, float]:
        """`logprob/*` since the last call; empty where the server had nothing to do."""
        now = {name: float(getattr(self.server.counters, name)) for name in self._last}
        passed = {name: now[name] - before for name, before in self._last.items()}
        self._last = now
        late, unscored = self._late, self._unscored
        self._late = self._unscored = 0
        if not passed["requests"] and not late:
            return {}
        metrics = {
            "timing_s/logprob_server": passed["busy_s"],
            "logprob/tokens_per_s": passed["tokens"] / passed["busy_s"] if passed["busy_s"] else 0.0,
            "logprob/stall_seconds": passed["stall_s"],
            "logprob/late": float(late),
            "logprob/left_to_trainer": float(unscored),
        }
        if passed["requests"]:
            metrics["logprob/wait_seconds"] = passed["wait_s"] / passed["requests"]
        return metrics
