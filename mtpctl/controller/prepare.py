"""Prepares a run before its actors start: model folder, tokenizer and problems, checked against each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mtpctl.checkpoint.listing import LISTING, Damaged, check_listing, read_listing, write_listing
from mtpctl.cluster.object_store import ObjectStore
from mtpctl.controller.preflight import try_code
from mtpctl.data.end_tokens import EndTokens, config_end_ids, end_tokens
from mtpctl.data.inspection import leak_warning
from mtpctl.data.problems import Problem
from mtpctl.data.prompts import check_lengths, encode_prompt
from mtpctl.data.sets import ProblemSets, load_problem_sets
from mtpctl.data.tokenizers import Tokenizer, check_fits_model, load_plain_tokenizer, load_tokenizer, make_byte_tokenizer
from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.families.reading import check_importable, extend_context
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import count_parameters
from mtpctl.plan.buckets import section_buckets
from mtpctl.plan.fitting import find_misfits
from mtpctl.plan.memory import WEIGHT_BYTES
from mtpctl.recipe.data import DataConfig
from mtpctl.recipe.model import LONG_CONTEXT, hf_config
from mtpctl.recipe.numerics import sends_unquantized_too
from mtpctl.recipe.rl import TeacherConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.samples import Ids, Sample, ids_of
from mtpctl.sync.remote import URL_FIELD
from mtpctl.sync.store import VersionStore, default_root, store_name

if TYPE_CHECKING:
    from mtpctl.convert.hf_folder import HfFolder

CACHED_PROMPTS = 1 << 16
DECODE_BATCH = 16
"""Number of responses that one thread job decodes. Each job wakes the event loop once."""


class Decoder:
    """Decodes responses in a thread. In the event loop, the thousands of responses of a step would block it for seconds."""

    def __init__(self) -> None:
        self._queue: list[tuple[Ids, asyncio.Future[str]]] = []
        self._task: asyncio.Task[None] | None = None

    async def decode(self, tokenizer: Tokenizer, ids: Ids) -> str:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._queue.append((ids, future))
        if self._task is None:
            self._task = asyncio.create_task(self._decode_queue(tokenizer))
        return await future

    async def _decode_queue(self, tokenizer: Tokenizer) -> None:
        try:
            while self._queue:
                batch, self._queue = self._queue[:DECODE_BATCH], self._queue[DECODE_BATCH:]
                try:
                    texts = await asyncio.to_thread(lambda responses: list(map(tokenizer.decode, responses)), [ids for ids, _ in batch])
                except Exception as error:
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(error)
                    continue
                for (_, future), text in zip(batch, texts, strict=True):
                    if not future.done():  # cancelled when the run ends
                        future.set_result(text)
        finally:
            self._task = None


@dataclass(frozen=True)
class Prepared:
    """The inputs of all stages of a run.

    Attributes:
        context: maximum tokens of a prompt with its response.
        warnings: about solutions that the reward function rejects, held-out problems that are trained on, and end tokens.
        tools: JSON schemas of the environment's tools, for the chat template.
        teacher: the teacher's model, if the run serves one.
        end_tokens: the tokens that end a response; if None, the tokenizer's EOS token.
    """

    model: HfFolder
    tokenizer: Tokenizer
    problems: ProblemSets
    context: int
    warnings: Sequence[str] = ()
    tools: Sequence[object] = ()
    teacher: HfFolder | None = None
    end_tokens: EndTokens | None = None
    _prompts: dict[Problem, Ids] = field(default_factory=dict, repr=False, compare=False)
    _decoder: Decoder = field(default_factory=Decoder, repr=False, compare=False)

    @property
    def end_ids(self) -> Sequence[int]:
        """The tokens that end a response."""
        return (self.tokenizer.eos_id,) if self.end_tokens is None else self.end_tokens.ids

    async def decode_response(self, sample: Sample) -> str:
        return await self._decoder.decode(self.tokenizer, sample.response_ids)

    def prompt_ids(self, problem: Problem, config: DataConfig) -> Ids:
        """Token ids of the problem's prompt. Cached, because the responses to a prompt share them."""
        if (ids := self._prompts.pop(problem, None)) is None:
            ids = ids_of(encode_prompt(self.tokenizer, problem, config, self.tools))
        self._prompts[problem] = ids  # most recently used last
        if len(self._prompts) > CACHED_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        return ids


def prepare(recipe: Recipe, run_dir: Path) -> Prepared:
    """Find, download or create the recipe's inputs.

    Raises UserError if they are missing or do not match, and PrerequisiteMissing if the hub or a sandbox is unavailable.
    """
    from mtpctl.convert.model_weights import ModelWeights

    # Fast checks first: they find the most common mistakes.
    problems = load_problem_sets(recipe.data, recipe.seed, recipe.evaluation, stages=recipe.train.stages, rollout=recipe.rollout)
    trial = try_code(recipe, problems, check_verifiers=True)
    model = open_model(recipe, run_dir)
    if recipe.train.needs_rollout and not recipe.rollout.traits.own_environment:
        check_importable(model.config)
    # This raises for tensors with wrong names, sizes or scales, before any rank is started.
    ModelWeights(model.path, mtp=recipe.mtp.mode != "off")
    tokenizer = open_tokenizer(recipe, model, run_dir)
    for folder in (run_dir / "model", run_dir / "tokenizer"):
        if folder.is_dir() and not (folder / LISTING).exists():
            write_listing(folder, 0, {})
    check_fits_model(tokenizer, model.shape.vocab)
    ends = find_end_tokens(recipe, model, tokenizer)
    context = recipe.rollout.context or model.shape.max_positions
    if context > model.shape.max_positions:
        raise UserError(
            f"rollout.context: the model has {model.shape.max_positions} positions, got {context}; lower it, or raise model.context"
        )
    # Errors about cluster resources are ignored here. They are checked after connecting to the cluster.
    if error := next((misfit.error for misfit in find_misfits(recipe, model.shape) if isinstance(misfit.error, UserError)), None):
        raise error
    tools: Sequence[object] = ()
    if trial.environment is not None:
        trial.environment.check_text(tokenizer)
        tools = trial.environment.tools
    supervised = problems.supervised if recipe.train.trains_on_rows else []
    if supervised is not problems.train:
        check_lengths(tokenizer, problems.train, recipe.data, context=context, tools=tools)
    check_lengths(tokenizer, supervised, recipe.data, context=context, targets=True, tools=tools, ends=ends)
    for held_out in problems.held_out.values():
        check_lengths(tokenizer, held_out, recipe.data, context=context, tools=tools)
    teacher = None
    if recipe.served_teacher is not None:
        teacher = _open_teacher(recipe.served_teacher, tokenizer)
    leak_count, held_out_count = problems.count_seen(), sum(map(len, problems.held_out.values()))
    end_warnings = [ends.disagreement, _teacher_end_warning(recipe, teacher, ends)]
    warnings = [*trial.warnings, *filter(None, [leak_warning(leak_count, held_out_count), *end_warnings])]
    return Prepared(model, tokenizer, problems, context, warnings, tools, teacher, ends)


def find_end_tokens(recipe: Recipe, model: HfFolder, tokenizer: Tokenizer) -> EndTokens:
    """The tokens that end a response, according to the recipe, the tokenizer and the model's configs.

    `model`: the folder from `open_model`, possibly in a run directory; generation_config.json is read from the recipe's `model.path`.
    Raises UserError like `config_end_ids`.
    """
    return end_tokens(tokenizer, recipe.rollout, config_end_ids(recipe.model, model.config), vocab=model.shape.vocab)


def _open_teacher(config: TeacherConfig, tokenizer: Tokenizer) -> HfFolder:
    from mtpctl.convert.hf_folder import HfFolder
    from mtpctl.convert.model_weights import ModelWeights

    assert config.path is not None
    field = "train.rl.teacher.path"
    folder = HfFolder.open(resolve_model_folder(config.path, field), field=field)
    ModelWeights(folder.path, mtp=False)
    if folder.shape.vocab < (policy_vocab := tokenizer.vocab_size):
        raise UserError(
            f"{field}: {folder.path} has {folder.shape.vocab} tokens and the policy's tokenizer {policy_vocab}; use another teacher"
        )
    return folder


def _teacher_end_warning(recipe: Recipe, teacher: HfFolder | None, ends: EndTokens) -> str:
    """A warning if the run has none of the end tokens of the teacher's model; empty otherwise."""
    if teacher is None:
        return ""
    teacher_ends = config_end_ids(recipe.model.model_copy(update={"path": str(teacher.path)}), teacher.config)
    if not teacher_ends or teacher_ends.keys() & set(ends.ids):
        return ""
    return (
        f"train.rl.teacher.path: {teacher.path} ends a response at {', '.join(map(str, teacher_ends))}, and the run at "
        f"{', '.join(map(str, ends.tokens))}: the teacher gives every end a low probability; set rollout.end_ids, or use another teacher"
    )


def open_model(recipe: Recipe, run_dir: Path) -> HfFolder:
    """The folder of the recipe's model: created in the run directory, or the folder or hub id that the recipe names.

    Its path is absolute, because actors of a joined cluster have another working directory.
    """
    from mtpctl.convert.hf_folder import HfFolder, create_hf_folder

    config, folder = recipe.model, recipe.model.folder_in(run_dir.absolute())
    if recipe.model.randomly_initialized:
        assert folder is not None
        if folder.exists():
            _verify_listing(folder)
            return HfFolder.open(folder)
        config_fields = hf_config(config)
        assert config_fields is not None, "hf_config, which may contact the hub, returns a config or raises"
        return create_hf_folder(config_fields, folder, recipe.seed)
    assert config.path is not None, "the recipe's checks reject a model without path and config"
    source = resolve_model_folder(config.path, "model.path")
    if folder is None or folder.exists():
        return HfFolder.open(folder or source)
    from mtpctl.convert.drafter import add_drafter, derive_folder

    if config.context is not None:
        extended_folder = run_dir.absolute() / LONG_CONTEXT
        if not extended_folder.exists():
            derive_folder(
                source, extended_folder, extend_context(HfFolder.open(source).config, config.context, config.rope_scaling), {}, link=True
            )
        source = extended_folder
    if config.drafter is None:
        return HfFolder.open(source)
    return add_drafter(source, folder, config.drafter.kind, config.drafter.layers, seed=recipe.seed)


def _verify_listing(folder: Path) -> None:
    """Compare a folder that the run has created with its checksums. Raises UserError if it is damaged."""
    try:
        if (listing := read_listing(folder)) is not None:
            check_listing(folder, listing, verify_checksums=True)
    except Damaged as damage:
        raise UserError(f"{folder}/{damage}; restore the file, or remove {folder}: the run creates it again") from damage


def open_version_store(folder: Path, recipe: Recipe, shape: ModelShape) -> VersionStore:
    """The version store of a run in `folder`. Requires a connection to Ray, which knows whether readers are on other hosts.

    If replicas may join on hosts that the cluster does not have yet, the store is in `folder`, which those hosts share.
    """
    url = recipe.sync_url
    object_store = None if url is None else ObjectStore(url, URL_FIELD)
    if recipe.rollout.elastic and recipe.cluster.address is not None:
        return VersionStore(folder / "versions", object_store)
    nbytes = count_parameters(shape)["total"] * WEIGHT_BYTES[recipe.train.precision]
    if sends_unquantized_too(recipe):
        # The unquantized versions are stored in a subfolder, and need space as well.
        nbytes += sum(bucket.nbytes for buckets in section_buckets(recipe, shape).values() for bucket in buckets)
    if recipe.sync.delta:
        # `default_root` reserves three versions of this size, so this adds 3/4 of a version for the deltas.
        nbytes += nbytes // 4
    return VersionStore(default_root(store_name(folder), nbytes, folder / "versions"), object_store)


def resolve_model_folder(name: str, field: str) -> Path:
    """The absolute path of a model folder, given by its path or hub id. `field`: its recipe key, for messages.

    Raises UserError if there is neither, PrerequisiteMissing if the hub does not answer.
    """
    if Path(name).is_dir():
        return Path(name).absolute()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except GatedRepoError as error:
        raise UserError(f"{field}: {name} is gated; accept its terms on the hub, and log in with `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"{field}: {name} is neither a folder on this machine nor a model on the hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise PrerequisiteMissing(
            f"{field}: {name} is not in the cache and could not be downloaded from the hub; download it, or name a folder"
        ) from error


def open_tokenizer(recipe: Recipe, model: HfFolder, run_dir: Path) -> Tokenizer:
    """The tokenizer that the recipe names, or the one in the model's folder."""
    name = recipe.model.tokenizer
    if name != "bytes":
        path = name or (recipe.model.path if recipe.model.randomly_initialized else None) or model.path
        return load_tokenizer(path, ignore_tools=recipe.data.ignore_tools)
    # If the model was created for this run, the tokenizer is written to its folder, so that the folder can be served.
    folder = model.path if recipe.model.config is not None else run_dir / "tokenizer"
    if folder != model.path and folder.exists():
        _verify_listing(folder)
    if not (folder / "tokenizer.json").exists():
        make_byte_tokenizer(folder)
    return load_plain_tokenizer(folder, ignore_tools=recipe.data.ignore_tools)
