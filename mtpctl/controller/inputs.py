"""A dry run's look at the files that a run will open: headers of weights, the tokenizer, and the first row of each set.

It reads no tensor and imports no torch, so that it takes about a second whatever the model's size.
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

    A model of the hub is not fetched. Raises UserError naming the file, and the tensor if it is one, that a run could not load.
    """
    model, teacher = recipe.model, recipe.train.rl.teacher
    if model.path is not None and not model.drawn and Path(model.path).is_dir():
        ModelWeights(Path(model.path), mtp=recipe.mtp.mode != "off")
    if "rl" in recipe.train.stages and teacher is not None and teacher.served and Path(teacher.path or "").is_dir():
        ModelWeights(Path(teacher.path or ""), mtp=False)


def check_rows(recipe: Recipe, shape: ModelShape) -> None:
    """Load the tokenizer and render the first row of each set, as the run will.

    Raises UserError for a tokenizer that is missing or does not fit the model, a chat template that is missing or does not take the row,
    and a row that is too long.
    """
    if recipe.model.tokenizer == "bytes" and recipe.data.task is not None:
        return  # both are the project's own, and fit each other
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
    """The recipe's tokenizer; None if it is one of the hub, which is not asked."""
    named = recipe.model.tokenizer
    if named == "bytes":
        with tempfile.TemporaryDirectory() as made:
            make_byte_tokenizer(Path(made))
            return load_byte_tokenizer(Path(made), ignore_tools=recipe.data.ignore_tools)
    folder = Path(named or recipe.model.path or "")
    return load_plain_tokenizer(folder, ignore_tools=recipe.data.ignore_tools) if folder.is_dir() else None
