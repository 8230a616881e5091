"""A log of what the routers of a vLLM engine on a CPU chose, step by step, and what it says that a sample's routes must be."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.routes import Routes
from mtpctl.samples import Sample


@dataclass(frozen=True, slots=True)
class Rows:
    """One request's rows of one step: tokens from `start` on, and their experts [tokens, layers, k]."""

    start: int
    tokens: list[int]
    routes: Routes


class RouterLog:
    """Records positions and tokens at the input of the target model, and experts in its routers."""

    def __init__(self, engine: VllmEngine, layers: tuple[int, ...]) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        core: Any = engine._llm.engine_core
        self.runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        self.layers, self.rows = layers, defaultdict[str, list[Rows]](list)
        self.prompts: dict[str, int] = {}
        self._chosen: dict[int, torch.Tensor] = {}
        self._read: tuple[torch.Tensor, torch.Tensor] | None = None
        model = self.runner.get_model()
        model.register_forward_pre_hook(self._reads, with_kwargs=True)
        for module in model.modules():
            if isinstance(module, MoERunner):
                module.router._compute_routing = partial(self._chooses, module.layer_id, module.router._compute_routing)  # type: ignore[attr-defined]
        self._execute = self.runner.execute_model
        self.runner.execute_model = self._runs

    def _reads(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._read = kwargs["input_ids"].clone(), kwargs["positions"].clone()

    def _chooses(self, layer: int, compute: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = compute(*args, **kwargs)
        self._chosen[layer] = experts.clone()
        return weights, experts

    def _runs(self, scheduled: Any, *args: Any) -> Any:
        self._read = None
        result = self._execute(scheduled, *args)
        if self._read is not None and self._chosen:
            tokens, positions = self._read
            routes = np.stack([self._chosen[layer].numpy() for layer in self.layers], axis=1)
            first = 0
            for request in self.runner.input_batch.req_ids:
                end = first + scheduled.num_scheduled_tokens[request]
                places = positions[first:end].tolist()
                assert places == list(range(places[0], places[0] + end - first))
                self.prompts[request] = self.runner.requests[request].num_prompt_tokens
                self.rows[request].append(Rows(places[0], tokens[first:end].tolist(), routes[first:end].copy()))
                first = end
        return result

    def routes_of(self, sample: Sample) -> list[Routes | None]:
        """For each token but the last, the row of the step that sampled the token behind it, or in which a prompt was read first."""
        tokens = sample.prompt_ids + sample.response_ids
        results: list[Routes | None] = [None] * (len(tokens) - 1)
        # In the order of the requests: what a later one reads again of the response has been answered for already.
        names = sorted((n for n in self.rows if n.startswith(f"{sample.name}/")), key=lambda n: int(n.split("/")[2].split("-")[0]))
        for name, follower in zip_longest(names, names[1:]):
            # A request may have read its last token, and what it sampled behind it was dropped: the next one reads it again.
            end = self.prompts[follower] - 1 if follower else len(results)
            for rows in self.rows[name]:
                for place, (token, routes) in enumerate(zip(rows.tokens, rows.routes, strict=True), rows.start):
                    if place >= end or token != tokens[place]:
                        break  # a rejected draft, and whatever was drafted behind it
                    if results[place] is None:
                        results[place] = routes
        return results
