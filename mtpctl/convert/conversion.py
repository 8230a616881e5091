"""Converts Hugging Face folders to Megatron checkpoints and back, a few parameters at a time.

The target is written to a temporary folder, which is renamed when it is complete. While one part is flushed to disk, the next is converted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Self

import torch

from mtpctl.checkpoint.listing import flush
from mtpctl.checkpoint.sharded import AdapterRecord, adapter_of
from mtpctl.convert.adapters import MergedReader, adapted, require_weights, write_adapter
from mtpctl.convert.fp8_folder import FP8, fp8_layout, names_to_quantize, quantization_config, written_tensors
from mtpctl.convert.hf_folder import HfFolder, carried_files, carry, check_target, write_config, written_config
from mtpctl.convert.hf_writer import NAMES, HfWriter, cast, common, main_dtype
from mtpctl.convert.model_weights import ModelWeights, Stored, plain_layout, recast, save_layout
from mtpctl.convert.parts import MARKER, PartReader, PartWriter, Reader
from mtpctl.convert.skeleton import Skeleton
from mtpctl.convert.source import HF, LAYOUT, Reference, checkpoint_at, has_mtp, names_in, reference_of
from mtpctl.convert.tensor_files import FolderWeights
from mtpctl.convert.verification import Verified, verify_adapter, verify_conversion, verify_merged
from mtpctl.errors import UserError
from mtpctl.families.reading import shape_of

To = Literal["megatron", "hf"]
Progress = Callable[[int, int], None]
"""Called with the bytes converted so far and in total."""
Report = Callable[[str], None]


@dataclass(frozen=True)
class ConversionOptions:
    """The options of `mtpctl convert-hf`. to: the expected target format; the actual one follows from the source."""

    to: To | None = None
    dtype: str | None = None
    model: Path | None = None
    verify: bool = False
    force: bool = False
    merge: bool = False


@dataclass(frozen=True)
class ConversionResult:
    """The result of a conversion. tensors: number of tensors in the Hugging Face folder."""

    to: To
    tensors: int
    nbytes: int
    seconds: float
    verified: Verified | None


_Written = tuple[int, int, Verified | None]
"""Numbers of tensors and bytes, and the result of the verification."""


def convert(source: Path, target: Path, options: ConversionOptions, *, report: Report, progress: Progress) -> ConversionResult:
    """Convert `source` to `target`. Raises UserError if it cannot be converted, before `target` is changed."""
    checkpoint = checkpoint_at(source, report)
    to: To = "megatron" if checkpoint is None else "hf"
    if options.to not in (None, to):
        kind = "a Hugging Face folder" if checkpoint is None else "a Megatron checkpoint"
        raise UserError(f"--to {options.to}: {source} is {kind} already")
    if options.dtype == FP8 and checkpoint is None:
        raise UserError("--dtype fp8: only Hugging Face folders are written in FP8, and SRC is one; name a checkpoint or a run")
    adapter = None if checkpoint is None else adapter_of(checkpoint)
    if options.merge and adapter is None:
        raise UserError(f"--merge: {source} holds no adapter")
    if options.dtype and adapter is not None and not options.merge:
        raise UserError("--dtype: an adapter's folder keeps the dtype of its training; remove --dtype, or write the model with --merge")
    check_target(source, target, force=options.force)
    if target.is_symlink():
        target = target.resolve()  # Replaces the folder, not the link to it.
    began = time.perf_counter()
    if checkpoint is None:
        written = _to_megatron(ModelWeights(source), target, options, progress)
    elif adapter is not None and not options.merge:
        written = _to_peft(checkpoint, reference_of(checkpoint, options.model), adapter, target, options, report)
    else:
        written = _to_hf(checkpoint, reference_of(checkpoint, options.model), adapter, target, options, report, progress)
    tensors, nbytes, verified = written
    return ConversionResult(to, tensors, nbytes, time.perf_counter() - began, verified)


def _to_megatron(weights: ModelWeights, target: Path, options: ConversionOptions, progress: Progress) -> _Written:
    folder, layout = weights.folder, weights.layout
    sizes = names_in(folder.shape, mtp=True)
    types = cast({name: weights.dtype(name) for name in weights}, sizes, NAMES.get(options.dtype or ""))
    config = written_config(folder.config, main_dtype(types, sizes), mtp_layers=folder.shape.mtp_layers)
    extras = [stored for stored in layout if not stored.pieces]
    weights.check_aliases()
    weights.check_extras()
    described = HfFolder(folder.path, config, shape_of(config))
    with _Output(target) as output:
        hf = output.folder / HF
        with Skeleton(described, mtp=True) as skeleton:
            parameters = skeleton.parameters
            dtypes = {name: common(types, parameter.needs) for name, parameter in parameters.items()}
            writer = PartWriter(output.folder, skeleton, dtypes)
            carried = HfWriter(hf, extras, {}, stem="carried", shard_bytes=1 << 62)
            count = _started(output, writer.nbytes, carried.nbytes, folder.path, progress)

            def make(name: str) -> torch.Tensor:
                value = skeleton.to_megatron(name, weights).to(dtypes[name])
                count(value.nbytes)
                return value

            with _in_thread() as run:
                for number in range(len(writer.parts)):
                    writer.write(number, make)
                    run(partial(writer.flush, number))
            hf.mkdir()
            if extras:
                carried.allocate()
                _put_extras(carried, extras, weights.raw)
            carry(folder.path, hf)
            write_config(config, hf)
            save_layout(recast(layout, types), hf / LAYOUT)
            writer.finish()
        stored_extras = FolderWeights(hf) if extras else None
        verified = verify_conversion(weights, output.folder, described, carried=stored_extras) if options.verify else None
        output.publish()
    return len(layout), sum(writer.nbytes) + carried.nbytes, verified


def _to_hf(
    checkpoint: Path,
    reference: Reference,
    adapter: AdapterRecord | None,
    target: Path,
    options: ConversionOptions,
    report: Report,
    progress: Progress,
) -> _Written:
    folder, shape = reference.folder, reference.folder.shape
    mtp = bool(shape.mtp_layers) and (adapter is not None or has_mtp(checkpoint))
    if shape.mtp_layers and not mtp:
        report(f"{checkpoint} was saved without MTP layers; the folder will have none")
    if reference.weights is not None:
        reference.weights.check_extras()
    sizes = names_in(shape, mtp=mtp)
    with contextlib.ExitStack() as stack:
        with adapted(checkpoint, folder, adapter) if adapter else Skeleton(folder, mtp=mtp) as skeleton:
            reader = (
                MergedReader(checkpoint, skeleton, require_weights(checkpoint, reference.weights), adapter)
                if adapter
                else PartReader(checkpoint, skeleton)
            )
            fp8 = names_to_quantize(shape, sizes) if options.dtype == FP8 else frozenset()
            wanted = torch.bfloat16 if fp8 else NAMES.get(options.dtype or "")
            types, layout = _types_and_layout(reference, reader, sizes, wanted)
            config = written_config(folder.config, main_dtype(types, sizes), mtp_layers=shape.mtp_layers if mtp else 0)
            if fp8:
                config["quantization_config"] = quantization_config(shape, fp8, layout)
                layout = fp8_layout(layout, fp8, shape)
            output = stack.enter_context(_Output(target))
            writer = HfWriter(output.folder, layout, sizes)
            count = _started(output, reader.nbytes, writer.nbytes - sum(reader.nbytes), folder.path, progress)
            writer.allocate()
            with _in_thread() as run:
                for number in range(len(reader.parts)):
                    for name, value in reader.read(number).items():
                        for hf_name, tensor in written_tensors(skeleton.to_hf(name, value), fp8):
                            writer.put(hf_name, tensor)
                        count(value.nbytes)
                    run(writer.flush)
            extras = [] if reference.carried is None else [stored for stored in layout if not stored.pieces]
            _put_extras(writer, extras, reference.carried)
            for source in reference.files:
                carry(source, output.folder)
            (output.folder / LAYOUT).unlink(missing_ok=True)
            write_config(config, output.folder)
        verified = None
        if options.verify and adapter is not None:
            base = require_weights(checkpoint, reference.weights)
            verified = verify_merged(ModelWeights(output.folder), checkpoint, base, adapter, carried=reference.carried, fp8=fp8)
        elif options.verify:
            verified = verify_conversion(ModelWeights(output.folder), checkpoint, folder, carried=reference.carried, fp8=fp8)
        output.publish()
    return len(layout), writer.nbytes, verified


def _to_peft(
    checkpoint: Path, reference: Reference, adapter: AdapterRecord, target: Path, options: ConversionOptions, report: Report
) -> _Written:
    if has_mtp(checkpoint):
        report("a PEFT folder cannot contain the trained MTP layers; --merge writes both")
    with _Output(target) as output:
        weights = require_weights(checkpoint, reference.weights)
        with adapted(checkpoint, weights.folder, adapter) as skeleton:
            tensors, nbytes = write_adapter(checkpoint, skeleton, weights.folder, adapter, output.folder)
        verified = verify_adapter(output.folder, checkpoint, weights, adapter) if options.verify else None
        output.publish()
    return tensors, nbytes, verified


def _types_and_layout(
    reference: Reference, reader: Reader, sizes: dict[str, int], wanted: torch.dtype | None
) -> tuple[dict[str, torch.dtype], list[Stored]]:
    """The dtypes of the model's tensors, and the layout of the folder to write."""
    saved = {name: reader.dtypes[each.name] for each in reader.skeleton.parameters.values() for name in each.needs}
    like = {name: stored.dtype for stored in reference.layout or [] for name in stored.pieces if name in sizes}
    types = cast({name: saved[name] for name in sizes}, sizes, wanted, like=like or None)
    layout = reference.layout if reference.layout is not None else plain_layout(reference.folder.shape, types)
    return types, recast([stored for stored in layout if all(name in types for name in stored.pieces)], types)


def _put_extras(writer: HfWriter, extras: list[Stored], weights: FolderWeights | None) -> None:
    """Write the tensors outside the language model, and close the files."""
    for stored in extras:
        assert weights is not None
        writer.put(stored.name, weights.tensor(stored.name))
    writer.flush()
    writer.close()


class _Output:
    """The temporary folder `target.partial`, which `publish` renames to the target. It is deleted if the block fails.

    The folder is locked during the conversion, and a marker file identifies it. If the process is killed, the folder remains, and the next
    conversion to the same target clears it.
    """

    def __init__(self, target: Path) -> None:
        """Raises UserError if another conversion writes to the folder, or if the folder was not created by a conversion."""
        self.target, self.folder = target, target.with_name(target.name + ".partial")
        try:
            existed = self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
        except OSError as error:
            raise UserError(f"{target}: cannot be created ({error.strerror}); name another DST") from error
        try:
            leftover = list(self.folder.iterdir())
            if (existed or leftover) and not (self.folder / MARKER).is_file():
                raise UserError(f"{self.folder}: exists, and was not created by a conversion; remove it or name another DST")
            for path in leftover:
                _remove(path)
            (self.folder / MARKER).touch()
        except BaseException:
            os.close(self._lock)
            raise

    def _locked(self) -> int:
        """Open and lock the folder. Raises UserError if another process writes to it, or has just renamed it."""
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), self.folder.stat()):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError) as error:
            os.close(handle)
            raise UserError(f"{self.folder}: another conversion writes there; wait for its end, or name another DST") from error
        return handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def publish(self) -> None:
        """Rename the complete folder to its target. An existing target is replaced."""
        old = self.target.with_name(self.target.name + ".replaced")
        if self.target.exists():
            _remove(old)
            self.target.rename(old)
        self.folder.rename(self.target)
        (self.target / MARKER).unlink()
        _remove(old)
        flush(self.target.parent)


def _remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _started(output: _Output, parts: list[int], tail: int, files: Path, progress: Progress) -> Callable[[int], None]:
    """Check the free disk space. Returns a function that reports progress: it takes the number of bytes just converted.

    tail: number of bytes that are written in addition to the parts. Raises UserError if the disk is too full.
    """
    total, done = sum(parts) + max(0, tail), 0
    needed = sum(parts) + tail + sum((files / name).stat().st_size for name in carried_files(files))
    free = shutil.disk_usage(output.folder).free
    if needed > free:
        raise UserError(f"{output.target}: needs {needed:,} bytes and {free:,} are free on its disk; free some, or name a DST elsewhere")
    progress(done, total)

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    return count


@contextlib.contextmanager
def _in_thread() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Yield a function that runs a callable in a thread, one at a time. Errors are raised by the next call or at the end of the block."""
    with ThreadPoolExecutor(1) as pool:
        last: Future[None] | None = None

        def run(call: Callable[[], None]) -> None:
            nonlocal last
            if last is not None:
                last.result()
            last = pool.submit(call)

        yield run
        if last is not None:
            last.result()
