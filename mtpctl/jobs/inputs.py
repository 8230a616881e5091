"""Checks of a dry run on the files that a run will open: headers of weights, the tokenizer, and the first row of each set.

They read no tensors and do not import torch, so they take about a second for a model of any size.
"""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path

from mtpctl.convert.model_weights import ModelWeights
from mtpctl.data.prompts import fit_problems
from mtpctl.data.sets import first_problems, rows_of
from mtpctl.data.tokenizers import Tokenizer, check_fits_model, load_byte_tokenizer, load_plain_tokenizer, make_byte_tokenizer
from mtpctl.errors import EnvironmentMissing
from mtpctl.families.shape import ModelShape
from mtpctl.recipe.schema import Recipe


def check_weights(recipe: Recipe) -> None:
    """Check names, types, shapes and sizes of the weights in the folders of the model and of a teacher that the run serves.

    Models from the hub are not downloaded. Raises UserError that names the file, or the tensor, that a run could not load.
    """
    model, teacher = recipe.model, recipe.train.rl.teacher
    if model.path is not None and not model.drawn and Path(model.path).is_dir():
        ModelWeights(Path(model.path), mtp=recipe.mtp.mode != "off")
    if "rl" in recipe.train.stages and teacher is not None and teacher.served and Path(teacher.path or "").is_dir():
        ModelWeights(Path(teacher.path or ""), mtp=False)


def check_rows(recipe: Recipe, shape: ModelShape) -> None:
    """Load the tokenizer and render the first row of each set, as the run will.

    Raises UserError if the tokenizer is missing or does not match the model, if the chat template is missing or rejects the row, or if the
    row is too long.
    """
    if recipe.model.tokenizer == "bytes" and recipe.data.task is not None:
        return  # both are created by mtpctl and match
    tokenizer = _tokenizer(recipe)
    if tokenizer is None:
        return
    check_fits_model(tokenizer, shape.vocab)
    context = min(recipe.rollout.context or shape.max_positions, shape.max_positions)
    sets = first_problems(recipe.data, recipe.seed, recipe.evaluation, 1, recipe.rollout)
    stages = recipe.train.stages
    rows = rows_of(recipe.data, recipe.evaluation, stages).get("sft")
    imitated = sets.get("train", [])
    if rows is not None:
        try:
            imitated = list(islice(rows.problems(fetch=False), 1))
        except EnvironmentMissing:  # not in the hub's cache
            imitated = []
    for role, problems in sets.items():
        if "rl" in stages or role != "train":
            fit_problems(tokenizer, problems, recipe.data, context=context)
    if "sft" in stages:
        fit_problems(tokenizer, imitated, recipe.data, context=context, targets=True)


def _tokenizer(recipe: Recipe) -> Tokenizer | None:
    """The recipe's tokenizer; None if it is on the hub, which is not contacted."""
    named = recipe.model.tokenizer
    if named == "bytes":
        with tempfile.TemporaryDirectory() as made:
            make_byte_tokenizer(Path(made))
            return load_byte_tokenizer(Path(made), ignore_tools=recipe.data.ignore_tools)
    folder = Path(named or recipe.model.path or "")
    return load_plain_tokenizer(folder, ignore_tools=recipe.data.ignore_tools) if folder.is_dir() else None
