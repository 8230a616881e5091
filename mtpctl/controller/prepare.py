"""What a run needs before its actors start: the model folder, the tokenizer and the problems, checked against each other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from mtpctl.checkpoint.listing import LISTING, Damaged, check_listing, read_listing, write_listing
from mtpctl.controller.preflight import try_code
from mtpctl.data.end_tokens import EndTokens, config_end_ids, end_tokens
from mtpctl.data.inspection import leak_warning
from mtpctl.data.problems import Problem
from mtpctl.data.prompts import encode_prompt, fit_problems
from mtpctl.data.sets import ProblemSets, load_problem_sets
from mtpctl.data.tokenizers import Tokenizer, check_fits_model, load_byte_tokenizer, load_tokenizer, make_byte_tokenizer
from mtpctl.errors import EnvironmentMissing, UserError
from mtpctl.families.reading import check_importable
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import count_parameters
from mtpctl.plan.fitting import misfits
from mtpctl.plan.memory import WEIGHT_BYTES
from mtpctl.recipe import yaml12
from mtpctl.recipe.data import DataConfig
from mtpctl.recipe.fields import KeyPath
from mtpctl.recipe.loading import dump_resolved, flatten
from mtpctl.recipe.model import hf_config, path_in_full
from mtpctl.recipe.rl import TeacherConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.samples import Ids, Sample, ids_of
from mtpctl.sync.store import VersionStore, default_root, name_of
from mtpctl.telemetry.run_directory import RunDirectory

if TYPE_CHECKING:
    from mtpctl.convert.hf_folder import HfFolder

KEPT_PROMPTS = 1 << 16


AT_ONCE = 16
"""Responses that one job of the thread decodes. Each job wakes the event loop once; the last of it waits for all of it."""


class Decoder:
    """Decodes in one thread at a time, which takes whatever waits for it: with many, the loop would wait for each whenever it goes on."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Ids, asyncio.Future[str]]] = []
        self._working: asyncio.Task[None] | None = None

    async def text(self, tokenizer: Tokenizer, ids: Ids) -> str:
        """The text of these ids."""
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, done))
        if self._working is None:
            self._working = asyncio.create_task(self._work(tokenizer))
        return await done

    async def _work(self, tokenizer: Tokenizer) -> None:
        try:
            while self._waiting:
                taken, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
                try:
                    texts = await asyncio.to_thread(_texts, tokenizer, [ids for ids, _ in taken])
                except Exception as error:
                    for _, done in taken:
                        if not done.done():
                            done.set_exception(error)
                    continue
                for (_, done), text in zip(taken, texts, strict=True):
                    if not done.done():  # nobody waits for a response of a run that ends
                        done.set_result(text)
        finally:
            self._working = None


def _texts(tokenizer: Tokenizer, responses: list[Ids]) -> list[str]:
    return [tokenizer.decode(ids) for ids in responses]


@dataclass(frozen=True)
class Prepared:
    """What all stages of a run work on. `context` bounds a prompt with its response, in tokens.

    `tools` are the JSON schemas that the environment has for the chat template. `warnings`: about problems whose own solution the reward
    function does not accept, held-out problems that are trained on, and end tokens. `teacher`: the model of a teacher that the run serves.
    `ends`: the tokens that end a response; by default the tokenizer's.
    """

    model: HfFolder
    tokenizer: Tokenizer
    problems: ProblemSets
    context: int
    warnings: Sequence[str] = ()
    tools: Sequence[object] = ()
    teacher: HfFolder | None = None
    ends: EndTokens | None = None
    _prompts: dict[Problem, Ids] = field(default_factory=dict, repr=False, compare=False)
    _decoder: Decoder = field(default_factory=Decoder, repr=False, compare=False)

    @property
    def end_ids(self) -> Sequence[int]:
        """The tokens that end a response."""
        return (self.tokenizer.eos_id,) if self.ends is None else self.ends.ids

    async def text_of(self, sample: Sample) -> str:
        """The response as text, decoded beside the event loop."""
        return await self._decoder.text(self.tokenizer, sample.response_ids)

    def prompt_ids(self, problem: Problem, config: DataConfig) -> Ids:
        """Token ids of the problem's prompt, which its responses share. Those asked for lately are kept."""
        if (found := self._prompts.pop(problem, None)) is None:
            found = ids_of(encode_prompt(self.tokenizer, problem, config, self.tools))
        self._prompts[problem] = found  # the newest stands last
        if len(self._prompts) > KEPT_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        return found


def prepare(recipe: Recipe, run_dir: Path) -> Prepared:
    """Find, download or make what the recipe names.

    Raises UserError for what is missing or does not fit, EnvironmentMissing where the engine here cannot serve the model's family.
    """
    from mtpctl.convert.model_weights import ModelWeights

    # What is read in a moment comes first, and with it the most common mistakes.
    problems = load_problem_sets(recipe.data, recipe.seed, recipe.evaluation, stages=recipe.train.stages, rollout=recipe.rollout)
    tried = try_code(recipe, problems, compare=True)
    model = model_of(recipe, run_dir)
    if "rl" in recipe.train.stages and not recipe.rollout.traits.own_environment:
        check_importable(model.config)
    # Finds tensors with wrong names, sizes or scales here, before any rank is started.
    ModelWeights(model.path, mtp=recipe.mtp.mode != "off")
    tokenizer = tokenizer_of(recipe, model, run_dir)
    for folder in (run_dir / "model", run_dir / "tokenizer"):
        if folder.is_dir() and not (folder / LISTING).exists():
            write_listing(folder, 0, {})
    check_fits_model(tokenizer, model.shape.vocab)
    ends = ends_of(recipe, model, tokenizer)
    context = recipe.rollout.context or model.shape.max_positions
    if context > model.shape.max_positions:
        raise UserError(f"rollout.context: {context} is more than the {model.shape.max_positions} positions of the model; lower it")
    # Cluster resources are checked when the cluster is known.
    if mistake := next((misfit.error for misfit in misfits(recipe, model.shape) if isinstance(misfit.error, UserError)), None):
        raise mistake
    tools: Sequence[object] = ()
    if tried.environment is not None:
        tried.environment.check_text(tokenizer)
        tools = tried.environment.tools
    imitated = problems.supervised if "sft" in recipe.train.stages else []
    if imitated is not problems.train:
        fit_problems(tokenizer, problems.train, recipe.data, context=context, tools=tools)
    fit_problems(tokenizer, imitated, recipe.data, context=context, targets=True, tools=tools, ends=ends)
    for held_out in problems.held_out.values():
        fit_problems(tokenizer, held_out, recipe.data, context=context, tools=tools)
    teacher = None
    if "rl" in recipe.train.stages and recipe.train.rl.teacher is not None and recipe.train.rl.teacher.served:
        teacher = _teacher_of(recipe.train.rl.teacher, tokenizer)
    leaked, count = problems.count_leaked(recipe.train.stages), sum(map(len, problems.held_out.values()))
    about_ends = [ends.disagreement, _other_ends(recipe, teacher, ends)]
    warnings = [*tried.warnings, *filter(None, [leak_warning(leaked, count), *about_ends])]
    return Prepared(model, tokenizer, problems, context, warnings, tools, teacher, ends)


def ends_of(recipe: Recipe, model: HfFolder, tokenizer: Tokenizer) -> EndTokens:
    """The tokens that end a response of the recipe's `model`, which may lie in a run directory. Raises UserError as `config_end_ids`."""
    return end_tokens(tokenizer, recipe.rollout, config_end_ids(recipe.model, model.config), vocab=model.shape.vocab)


def _teacher_of(config: TeacherConfig, tokenizer: Tokenizer) -> HfFolder:
    from mtpctl.convert.hf_folder import HfFolder
    from mtpctl.convert.model_weights import ModelWeights

    assert config.path is not None
    field = "train.rl.teacher.path"
    folder = HfFolder.open(local_folder(config.path, field), field=field)
    ModelWeights(folder.path, mtp=False)
    if folder.shape.vocab < (needed := tokenizer.vocab_size):
        raise UserError(f"{field}: {folder.path} has {folder.shape.vocab} tokens and the policy's tokenizer {needed}; take another teacher")
    return folder


def _other_ends(recipe: Recipe, teacher: HfFolder | None, ends: EndTokens) -> str:
    """A warning if the teacher's model names end tokens of which the run has none; empty if not."""
    if teacher is None:
        return ""
    theirs = config_end_ids(recipe.model.model_copy(update={"path": str(teacher.path)}), teacher.config)
    if not theirs or theirs.keys() & set(ends.ids):
        return ""
    return (
        f"train.rl.teacher.path: {teacher.path} ends a response at {', '.join(map(str, theirs))}, and the run at "
        f"{', '.join(map(str, ends.tokens))}: to the teacher every end is unlikely; set rollout.end_ids, or take another teacher"
    )


def model_of(recipe: Recipe, run_dir: Path) -> HfFolder:
    """The folder of the recipe's model: created in the run directory, or the folder or hub id that the recipe names.

    Its path is absolute, since actors of a cluster that is joined have another working directory.
    """
    from mtpctl.convert.hf_folder import HfFolder, create_hf_folder

    config = recipe.model
    if recipe.model.drawn:
        folder = run_dir.absolute() / "model"
        if folder.exists():
            _verify_created(folder)
            return HfFolder.open(folder)
        fields = hf_config(config)
        assert fields is not None, "the hub was asked"
        return create_hf_folder(fields, folder, recipe.seed)
    assert config.path is not None, "the recipe's checks let no model without path and config through"
    return HfFolder.open(local_folder(config.path, "model.path"))


def _verify_created(folder: Path) -> None:
    """Compare a folder that the run has created with its list of checksums. Raises UserError if it is damaged."""
    try:
        if (listing := read_listing(folder)) is not None:
            check_listing(folder, listing, contents=True)
    except Damaged as damage:
        raise UserError(f"{folder}/{damage}; restore the file, or remove {folder}: the run creates it again") from damage


def check_drawn(recipe: Recipe, run: RunDirectory) -> None:
    """Raise UserError where the run began with random weights of another model or seed than the recipe's."""
    folder = run.path / "model"
    if not recipe.model.drawn or not folder.is_dir() or (tree := run.read_recipe()) is None:
        return
    earlier = _drawn_from(tree)
    asked = _drawn_from(recipe.model_dump(mode="json", by_alias=True))
    for key in [*asked, *earlier]:
        if (before := earlier.get(key)) != (now := asked.get(key)):
            raise UserError(
                f"{'.'.join(key)}: {now!r} is asked for, and {folder} was made with {before!r}; restore it, or name another run_dir"
            )


def _drawn_from(tree: Mapping[str, object]) -> dict[KeyPath, object]:
    """The values of a resolved recipe that its random weights depend on, by key."""
    values = flatten(tree)
    found = {key: value for key, value in values.items() if key == ("seed",) or key[:2] == ("model", "config")}
    path = values.get(("model", "path"))
    return {**found, ("model", "path"): path_in_full(None if path is None else str(path))}


def changed_old_logprobs(recipe: Recipe, run: RunDirectory) -> str:
    """Say that the recipe takes the policy ratio against other old log-probs than the run did before; empty where it does not.

    A release with another default changes them although the user's recipe is the same.
    """
    if (tree := run.read_recipe()) is None:
        return ""
    before = flatten(tree).get(("train", "rl", "old_logprobs"))
    if before == "auto":
        try:
            before = Recipe.model_validate(tree).old_logprobs
        except ValidationError:  # of a release with other keys: what it took is not known
            return ""
    if before in (None, recipe.old_logprobs):
        return ""
    return f"train.rl.old_logprobs comes to {recipe.old_logprobs} now, and came to {before} before; set it to {before} to keep that"


def changed_task(recipe: Recipe, run: RunDirectory) -> list[str]:
    """The keys in which the recipe asks for another task than the run was trained on: its rows, reward or environment.

    Of files the name counts, since a run may have been moved together with them.
    """
    if (tree := run.read_recipe()) is None:
        return []
    before = flatten(tree)
    now = flatten(yaml12.parse(dump_resolved(recipe), "the recipe").value)
    environment = {("rollout", name) for name in ("environment", "environment_args", "environment_eval_args")}
    asked = [key for key in now if key[0] in ("data", "reward") or key[:2] in environment]
    return [".".join(key) for key in asked if _without_folder(now[key]) != _without_folder(before.get(key))]


def _without_folder(value: object) -> object:
    return value.rpartition("/")[2] if isinstance(value, str) else value


def store_in(folder: Path, recipe: Recipe, shape: ModelShape) -> VersionStore:
    """The version store of a run in `folder`. Called when Ray is connected, which knows whether readers are on other hosts.

    Where replicas may join on hosts that the cluster does not have yet, the store is in `folder`, which those hosts see.
    """
    if recipe.rollout.elastic and recipe.cluster.address is not None:
        return VersionStore(folder / "versions")
    size = count_parameters(shape)["total"] * WEIGHT_BYTES[recipe.train.precision]
    return VersionStore(default_root(name_of(folder), size, folder / "versions"))


def local_folder(named: str, field: str) -> Path:
    """A model folder with its whole path: that of the name, or the one that the hub gives. `field`: what the user calls it.

    Raises UserError where there is neither, EnvironmentMissing where the hub does not answer.
    """
    return Path(named).absolute() if Path(named).is_dir() else _download(named, field)


def _download(hub_id: str, field: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except RepositoryNotFoundError as error:
        raise UserError(f"{field}: {hub_id} is neither a folder here nor a model of the hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise EnvironmentMissing(
            f"{field}: the hub did not give {hub_id}, and it is not in the cache; download it, or name a folder"
        ) from error


def tokenizer_of(recipe: Recipe, model: HfFolder, run_dir: Path) -> Tokenizer:
    """The tokenizer that the recipe names, or the one in the model's folder."""
    named = recipe.model.tokenizer
    if named != "bytes":
        path = named or (recipe.model.path if recipe.model.drawn else None) or model.path
        return load_tokenizer(path, ignore_tools=recipe.data.ignore_tools)
    # In the folder of a model that was created for this run, so that it can be served as it is; else in the run directory.
    folder = model.path if recipe.model.config is not None else run_dir / "tokenizer"
    if folder != model.path and folder.exists():
        _verify_created(folder)
    if not (folder / "tokenizer.json").exists():
        make_byte_tokenizer(folder)
    return load_byte_tokenizer(folder, ignore_tools=recipe.data.ignore_tools)
