"""From Hugging Face folders to Megatron checkpoints and back, a few parameters at a time.

The target is written under a temporary name, with a journal of the parts that are on the disk, and renamed when it is whole. While one
part is brought to the disk, the next one is converted.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from mtpctl.checkpoint.sharded import AdapterRecord, adapter_of
from mtpctl.convert.adapters import MergedReader, adapted, needed_weights, write_adapter
from mtpctl.convert.dtypes import NAMES, cast, common, main_dtype
from mtpctl.convert.hf_folder import HfConfig, HfFolder, carried_files, carry, check_target, write_config, written_config
from mtpctl.convert.hf_writer import HfWriter
from mtpctl.convert.journal import JOURNAL, Conversion, Journal, PartRecord
from mtpctl.convert.model_weights import ModelWeights, Stored, plain_layout, recast, save_layout
from mtpctl.convert.parts import PartReader, PartWriter, Reader
from mtpctl.convert.skeleton import Skeleton
from mtpctl.convert.source import HF, LAYOUT, Reference, checkpoint_at, has_mtp, names_in, reference_of
from mtpctl.convert.tensor_files import FolderWeights
from mtpctl.convert.verification import Verified, verify_adapter, verify_conversion, verify_merged
from mtpctl.errors import UserError
from mtpctl.families.reading import shape_of

To = Literal["megatron", "hf"]
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class ConversionOptions:
    """The options of `mtpctl convert-hf`. `to`: checked against what the source is."""

    to: To | None = None
    dtype: str | None = None
    model: Path | None = None
    verify: bool = False
    force: bool = False
    merge: bool = False


@dataclass(frozen=True)
class ConversionResult:
    """What was written. Tensors are counted as the Hugging Face folder names them."""

    to: To
    tensors: int
    nbytes: int
    seconds: float
    verified: Verified | None


_Written = tuple[int, int, Verified | None]
"""Tensors, bytes, and the result of verifying."""


def convert(source: Path, target: Path, options: ConversionOptions, *, say: Say, progress: Progress) -> ConversionResult:
    """Convert `source` to `target`. Raises UserError for what cannot be converted, before `target` is touched."""
    checkpoint = checkpoint_at(source, say)
    to: To = "megatron" if checkpoint is None else "hf"
    if options.to not in (None, to):
        what = "a Hugging Face folder" if checkpoint is None else "a Megatron checkpoint"
        raise UserError(f"--to {options.to}: {source} is {what} already")
    adapter = None if checkpoint is None else adapter_of(checkpoint)
    if options.merge and adapter is None:
        raise UserError(f"--merge: {source} holds no adapter")
    if options.dtype and adapter is not None and not options.merge:
        raise UserError("--dtype: an adapter's folder keeps the type that it was trained in; leave it out, or write the model with --merge")
    check_target(source, target, force=options.force)
    if target.is_symlink():
        target = target.resolve()  # the folder that the link names is written or replaced, and the link stays
    began = time.perf_counter()
    if checkpoint is None:
        made = _to_megatron(ModelWeights(source), target, options, say, progress)
    elif adapter is not None and not options.merge:
        made = _to_peft(checkpoint, reference_of(checkpoint, options.model), adapter, target, options, say)
    else:
        made = _to_hf(checkpoint, reference_of(checkpoint, options.model), adapter, target, options, say, progress)
    tensors, nbytes, verified = made
    return ConversionResult(to, tensors, nbytes, time.perf_counter() - began, verified)


def _to_megatron(weights: ModelWeights, target: Path, options: ConversionOptions, say: Say, progress: Progress) -> _Written:
    folder, layout = weights.folder, weights.layout
    sizes = names_in(folder.shape, mtp=True)
    types = cast({name: weights.dtype(name) for name in weights}, sizes, NAMES.get(options.dtype or ""))
    config = written_config(folder.config, main_dtype(types, sizes), mtp_layers=folder.shape.mtp_layers)
    extras = [stored for stored in layout if not stored.pieces]
    weights.check_aliases()
    weights.check_extras()
    described = HfFolder(folder.path, config, shape_of(config))
    with _journal_of(target, _conversion("megatron", weights.raw.files, config, recast(layout, types))) as journal:
        beside = journal.work / HF
        with Skeleton(described, mtp=True) as skeleton:
            parameters = skeleton.parameters
            dtypes = {name: common(types, parameter.needs) for name, parameter in parameters.items()}
            writer = PartWriter(journal.work, skeleton, dtypes)
            carried = HfWriter(beside, extras, {}, stem="carried", shard_bytes=1 << 62)
            count = _begin(journal, writer.nbytes, carried.nbytes, folder.path, say, progress)

            def make(name: str) -> torch.Tensor:
                value = skeleton.map.to_megatron(parameters[name], weights).to(dtypes[name])
                count(value.nbytes)
                return value

            with _flusher(journal) as flush_part:
                for number in range(len(writer.parts)):
                    if number not in journal.done:
                        flush_part(number, writer.write(number, make), partial(writer.flush, number))
            beside.mkdir(exist_ok=True)
            _put_extras(carried, extras, weights.raw)
            carry(folder.path, beside)
            write_config(config, beside)
            save_layout(recast(layout, types), beside / LAYOUT)
            writer.finish([journal.done[number] or [] for number in range(len(writer.parts))])
        kept = FolderWeights(beside) if extras else None
        verified = verify_conversion(weights, journal.work, described, carried=kept) if options.verify else None
        journal.publish()
    return len(layout), sum(writer.nbytes) + carried.nbytes, verified


def _to_hf(
    checkpoint: Path,
    reference: Reference,
    adapter: AdapterRecord | None,
    target: Path,
    options: ConversionOptions,
    say: Say,
    progress: Progress,
) -> _Written:
    folder, shape = reference.folder, reference.folder.shape
    mtp = bool(shape.mtp_layers) and (adapter is not None or has_mtp(checkpoint))
    if shape.mtp_layers and not mtp:
        say(f"{checkpoint} was saved without MTP layers; the folder will have none")
    if reference.weights is not None:
        reference.weights.check_extras()
    sizes = names_in(shape, mtp=mtp)
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    with contextlib.ExitStack() as stack:
        with adapted(checkpoint, folder, adapter) if adapter else Skeleton(folder, mtp=mtp) as skeleton:
            reader = (
                MergedReader(checkpoint, skeleton, needed_weights(checkpoint, reference.weights), adapter)
                if adapter
                else PartReader(checkpoint, skeleton)
            )
            types, layout = _types_and_layout(reference, reader, sizes, NAMES.get(options.dtype or ""))
            config = written_config(folder.config, main_dtype(types, sizes), mtp_layers=shape.mtp_layers if mtp else 0)
            extras = [stored for stored in layout if not stored.pieces]
            journal = stack.enter_context(_journal_of(target, _conversion("hf", files, config, layout)))
            writer = HfWriter(journal.work, layout, sizes)
            tail = writer.nbytes - sum(reader.nbytes)
            count = _begin(journal, reader.nbytes, tail, folder.path, say, progress)
            writer.allocate()
            with _flusher(journal) as flush_part:
                for number in range(len(reader.parts)):
                    if number in journal.done:
                        continue
                    for name, value in reader.read(number).items():
                        for hf_name, tensor in skeleton.to_hf(name, value).items():
                            writer.put(hf_name, tensor)
                        count(value.nbytes)
                    flush_part(number, None, writer.flush)
            if reference.carried is not None:
                for stored in extras:
                    writer.put(stored.name, reference.carried.tensor(stored.name))
            writer.flush()
            writer.close()
            for place in reference.files:
                carry(place, journal.work)
            (journal.work / LAYOUT).unlink(missing_ok=True)
            write_config(config, journal.work)
        verified = None
        if options.verify and adapter is not None:
            base = needed_weights(checkpoint, reference.weights)
            verified = verify_merged(ModelWeights(journal.work), checkpoint, base, adapter, carried=reference.carried)
        elif options.verify:
            verified = verify_conversion(ModelWeights(journal.work), checkpoint, folder, carried=reference.carried)
        journal.publish()
    return len(layout), writer.nbytes, verified


def _to_peft(
    checkpoint: Path, reference: Reference, adapter: AdapterRecord, target: Path, options: ConversionOptions, say: Say
) -> _Written:
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    if has_mtp(checkpoint):
        say("an adapter's folder has no place for the MTP layers that were trained beside it; --merge writes both")
    with _journal_of(target, _conversion("hf", files, {}, [])) as journal:
        weights = needed_weights(checkpoint, reference.weights)
        with adapted(checkpoint, weights.folder, adapter) as skeleton:
            tensors, nbytes = write_adapter(checkpoint, skeleton, weights.folder, adapter, journal.work)
        verified = verify_adapter(journal.work, checkpoint, weights, adapter) if options.verify else None
        journal.publish()
    return tensors, nbytes, verified


def _types_and_layout(
    reference: Reference, reader: Reader, sizes: dict[str, int], wanted: torch.dtype | None
) -> tuple[dict[str, torch.dtype], list[Stored]]:
    """Types of the model's tensors, and how the folder stores them."""
    held = {name: reader.dtypes[each.name] for each in reader.skeleton.parameters.values() for name in each.needs}
    like = {name: stored.dtype for stored in reference.layout or [] for name in stored.pieces if name in sizes}
    types = cast({name: held[name] for name in sizes}, sizes, wanted, like=like or None)
    layout = reference.layout if reference.layout is not None else plain_layout(reference.folder.shape, types)
    return types, recast([stored for stored in layout if all(name in types for name in stored.pieces)], types)


# ------------------------------------------------------------------------------------------------------------ target


def _begin(journal: Journal, parts: list[int], tail: int, files: Path, say: Say, progress: Progress) -> Callable[[int], None]:
    """Report the progress so far. Returns a function that is called with bytes as they are converted.

    tail: bytes that are written after the parts. Raises UserError where the disk is too small.
    """
    total = sum(parts) + max(0, tail)
    done = sum(parts[number] for number in journal.done)
    beside = sum((files / name).stat().st_size for name in carried_files(files))
    # Files of an interrupted conversion are allocated already.
    there = sum(path.stat().st_size for path in journal.work.rglob("*") if path.is_file() and path.name != JOURNAL)
    needed = sum(parts) + tail + beside - there
    free = shutil.disk_usage(journal.work).free
    if needed > free:
        raise UserError(f"{journal.target}: needs {needed:,} bytes and {free:,} are free on its disk; free some, or name a DST elsewhere")
    if journal.resumed:
        say(f"going on with an interrupted conversion: {done:,} of {total:,} bytes are there")
    elif journal.discarded:
        say(f"{journal.work} held the beginnings of another conversion; starting anew")
    progress(done, total)

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    return count


def _conversion(to: To, files: list[Path], config: HfConfig, layout: list[Stored]) -> Conversion:
    states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return {"to": to, "files": states, "config": config, "layout": hashlib.sha256(repr(layout).encode()).hexdigest()}


@contextlib.contextmanager
def _journal_of(target: Path, conversion: Conversion) -> Iterator[Journal]:
    """The journal of the target. If the block fails before a part is on the disk, the temporary folder is deleted."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        journal = Journal(target, conversion)
    except OSError as error:
        raise UserError(f"{target}: cannot be made ({error.strerror}); name another DST") from error
    try:
        yield journal
    except BaseException:
        if not journal.done:
            shutil.rmtree(journal.work, ignore_errors=True)
        raise
    finally:
        journal.close()


@contextlib.contextmanager
def _flusher(journal: Journal) -> Iterator[Callable[[int, PartRecord, Callable[[], None]], None]]:
    """A function that flushes a part to the disk in a thread and notes it in the journal, one part at a time.

    An error in the thread is raised by the next call, or at the end of the block.
    """
    with ThreadPoolExecutor(1) as pool:
        last: Future[None] | None = None

        def bring(number: int, noted: PartRecord, flush: Callable[[], None]) -> None:
            flush()
            journal.note(number, noted)

        def flush_part(number: int, noted: PartRecord, flush: Callable[[], None]) -> None:
            nonlocal last
            if last is not None:
                last.result()
            last = pool.submit(bring, number, noted, flush)

        yield flush_part
        if last is not None:
            last.result()


# ------------------------------------------------------------------------------------------------------------- pieces


def _put_extras(writer: HfWriter, extras: list[Stored], weights: FolderWeights) -> None:
    if extras:
        writer.allocate()
        for stored in extras:
            writer.put(stored.name, weights.tensor(stored.name))
        writer.flush()
        writer.close()
