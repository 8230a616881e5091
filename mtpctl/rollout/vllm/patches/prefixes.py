"""A prefix cache that does not mix weight versions, for engines that keep the KV cache of running requests at a sync (vLLM 0.32.0).

A pause with `clear_cache=False` keeps the blocks of running requests, but the prefix cache as well, so that later requests would reuse
blocks that earlier weights computed. Here such a pause starts a new era. The era is part of the cache salt of every request that starts
afterwards, so that requests find blocks of the same era only. Blocks of earlier eras are evicted when others need their memory.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from mtpctl.rollout.vllm.patches.guard import assign, patch

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

_ERA = "mtpctl_era"
_REQUEST_SALT = "mtpctl_request_salt"


@patch
def install_prefix_eras() -> None:
    """Start an era at each pause that keeps the cache, and add the era to the salt of new requests."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    finish_pause, add_request = EngineCore._finish_pause, Scheduler.add_request

    def _finish_pause(self: EngineCore, clear_cache: bool) -> None:
        finish_pause(self, clear_cache)
        if not clear_cache:
            start_era(cast("Scheduler", self.scheduler))

    def add(self: Scheduler, request: Request) -> None:
        if era := self.__dict__.get(_ERA, 0):
            _salt(request, era)
        add_request(self, request)

    assign(EngineCore, _finish_pause=_finish_pause)
    assign(Scheduler, add_request=add)


def start_era(scheduler: Scheduler) -> None:
    """Let all requests without KV blocks start in a new era. Requests in the middle of their prefill give up their blocks.

    A running request that has sampled a token keeps its blocks and its era. One that was preempted before the sync starts in the new era.
    No step may be in flight.
    """
    era = scheduler.__dict__[_ERA] = scheduler.__dict__.get(_ERA, 0) + 1
    # The first token of such a request would be attributed to the new weights alone.
    prefilling = [request for request in scheduler.running if not request.num_output_tokens]
    scheduler.running = [request for request in scheduler.running if request.num_output_tokens]
    now = time.monotonic()
    for request in reversed(prefilling):
        scheduler._preempt_request(request, now, drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    for request in scheduler.requests.values():
        if not request.num_computed_tokens:
            _salt(request, era)


def _salt(request: Request, era: int) -> None:
    own = request.__dict__.setdefault(_REQUEST_SALT, request.cache_salt or "")
    request.cache_salt = f"mtpctl-{era}:{own}"
    request.block_hashes.clear()
    request.update_block_hashes()
