"""Bytes of the routes that samples carry, from the model's shape and the recipe."""

from __future__ import annotations

from dataclasses import dataclass

from mtpctl.families.shape import ModelShape
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.train import Replay
from mtpctl.routes import RouteShape


@dataclass(frozen=True, slots=True)
class RouteBytes:
    """Bytes of the routes of a token, of the longest sample, and of a batch of such samples, which every trainer rank receives."""

    replay: Replay
    token: int
    sample: int
    batch: int


def route_bytes(recipe: Recipe, shape: ModelShape) -> RouteBytes | None:
    """None where samples carry no routes."""
    replay, routes, rl = recipe.replay(shape), RouteShape.of(shape), recipe.train.rl
    if replay == "off" or routes is None:
        return None
    context = min(recipe.rollout.context or shape.max_positions, shape.max_positions)
    sample = context * routes.token_bytes
    return RouteBytes(replay, routes.token_bytes, sample, rl.prompts_per_step * rl.group_size * sample)
