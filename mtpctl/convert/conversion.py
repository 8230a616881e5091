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
from mtpctl.convert.adapters import MergedReader, adapter_skeleton, require_weights, write_adapter
from mtpctl.convert.hf_folder import HfFolder, check_target, config_to_write, copied_files, copy_files, write_config
from mtpctl.convert.hf_writer import (
    DTYPES,
    FP8,
    HfWriter,
    cast_dtypes,
    common_dtype,
    fp8_layout,
    main_dtype,
    names_to_quantize,
    quantization_config,
    written_tensors,
)
from mtpctl.convert.model_weights import ModelWeights, Stored, plain_layout, save_layout, with_dtypes
from mtpctl.convert.parts import MARKER, PartReader, PartWriter, Reader, Skeleton
from mtpctl.convert.source import HF, LAYOUT, Reference, checkpoint_at, has_mtp, reference_of, tensor_sizes
from mtpctl.convert.tensor_files import FolderWeights
from mtpctl.convert.verification import VerificationResult, verify_adapter, verify_conversion, verify_merged
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
    verified: VerificationResult | None


_Written = tuple[int, int, VerificationResult | None]
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
    sizes = tensor_sizes(folder.shape, mtp=True)
    types = cast_dtypes({name: weights.dtype(name) for name in weights}, sizes, DTYPES.get(options.dtype or ""))
    config = config_to_write(folder.config, main_dtype(types, sizes), mtp_layers=folder.shape.mtp_layers)
    extras = [stored for stored in layout if not stored.pieces]
    weights.check_aliases()
    weights.check_extras()
    target_model = HfFolder(folder.path, config, shape_of(config))
    with _Output(target) as output:
        hf = output.folder / HF
        with Skeleton(target_model, mtp=True) as skeleton:
            parameters = skeleton.parameters
            dtypes = {name: common_dtype(types, parameter.needs) for name, parameter in parameters.items()}
            writer = PartWriter(output.folder, skeleton, dtypes)
            extras_writer = HfWriter(hf, extras, {}, stem="carried", shard_bytes=1 << 62)
            count = _start_progress(output, writer.nbytes, extras_writer.nbytes, folder.path, progress)

            def compute(name: str) -> torch.Tensor:
                value = skeleton.to_megatron(name, weights).to(dtypes[name])
                count(value.nbytes)
                return value

            with _in_thread() as run:
                for number in range(len(writer.parts)):
                    writer.write(number, compute)
                    run(partial(writer.flush, number))
            hf.mkdir()
            if extras:
                extras_writer.allocate()
                _put_extras(extras_writer, extras, weights.raw)
            copy_files(folder.path, hf)
            write_config(config, hf)
            save_layout(with_dtypes(layout, types), hf / LAYOUT)
            writer.finish()
        stored_extras = FolderWeights(hf) if extras else None
        verified = verify_conversion(weights, output.folder, target_model, extra_weights=stored_extras) if options.verify else None
        output.publish()
    return len(layout), sum(writer.nbytes) + extras_writer.nbytes, verified


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
    sizes = tensor_sizes(shape, mtp=mtp)
    with contextlib.ExitStack() as stack:
        with adapter_skeleton(checkpoint, folder, adapter) if adapter else Skeleton(folder, mtp=mtp) as skeleton:
            reader = (
                MergedReader(checkpoint, skeleton, require_weights(checkpoint, reference.weights), adapter)
                if adapter
                else PartReader(checkpoint, skeleton)
            )
            fp8 = names_to_quantize(shape, sizes) if options.dtype == FP8 else frozenset()
            dtype = torch.bfloat16 if fp8 else DTYPES.get(options.dtype or "")
            types, layout = _types_and_layout(reference, reader, sizes, dtype)
            config = config_to_write(folder.config, main_dtype(types, sizes), mtp_layers=shape.mtp_layers if mtp else 0)
            if fp8:
                config["quantization_config"] = quantization_config(shape, fp8, layout)
                layout = fp8_layout(layout, fp8, shape)
            output = stack.enter_context(_Output(target))
            writer = HfWriter(output.folder, layout, sizes)
            count = _start_progress(output, reader.nbytes, writer.nbytes - sum(reader.nbytes), folder.path, progress)
            writer.allocate()
            with _in_thread() as run:
                for number in range(len(reader.parts)):
                    for name, value in reader.read(number).items():
                        for hf_name, tensor in written_tensors(skeleton.to_hf(name, value), fp8):
                            writer.put(hf_name, tensor)
                        count(value.nbytes)
                    run(writer.flush)
            extras = [] if reference.extra_weights is None else [stored for stored in layout if not stored.pieces]
            _put_extras(writer, extras, reference.extra_weights)
            for source in reference.files:
                copy_files(source, output.folder)
            (output.folder / LAYOUT).unlink(missing_ok=True)
            write_config(config, output.folder)
        verified = None
        if options.verify and adapter is not None:
            base = require_weights(checkpoint, reference.weights)
            verified = verify_merged(ModelWeights(output.folder), checkpoint, base, adapter, extra_weights=reference.extra_weights, fp8=fp8)
        elif options.verify:
            verified = verify_conversion(ModelWeights(output.folder), checkpoint, folder, extra_weights=reference.extra_weights, fp8=fp8)
        output.publish()
    return len(layout), writer.nbytes, verified


def _to_peft(
    checkpoint: Path, reference: Reference, adapter: AdapterRecord, target: Path, options: ConversionOptions, report: Report
) -> _Written:
    if has_mtp(checkpoint):
        report("a PEFT folder cannot contain the trained MTP layers; --merge writes both")
    with _Output(target) as output:
        weights = require_weights(checkpoint, reference.weights)
        with adapter_skeleton(checkpoint, weights.folder, adapter) as skeleton:
            tensors, nbytes = write_adapter(checkpoint, skeleton, weights.folder, adapter, output.folder)
        verified = verify_adapter(output.folder, checkpoint, weights, adapter) if options.verify else None
        output.publish()
    return tensors, nbytes, verified


def _types_and_layout(
    reference: Reference, reader: Reader, sizes: dict[str, int], dtype: torch.dtype | None
) -> tuple[dict[str, torch.dtype], list[Stored]]:
    """The dtypes of the model's tensors, and the layout of the folder to write."""
    saved = {name: reader.dtypes[each.name] for each in reader.skeleton.parameters.values() for name in each.needs}
    folder_dtypes = {name: stored.dtype for stored in reference.layout or [] for name in stored.pieces if name in sizes}
    types = cast_dtypes({name: saved[name] for name in sizes}, sizes, dtype, folder_dtypes=folder_dtypes or None)
    layout = reference.layout if reference.layout is not None else plain_layout(reference.folder.shape, types)
    return types, with_dtypes([stored for stored in layout if all(name in types for name in stored.pieces)], types)


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
            self._lock = self._lock_folder()
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

    def _lock_folder(self) -> int:
        """Open and lock the folder. Raises UserError if another process writes to it, or has just renamed it."""
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), self.folder.stat()):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError) as error:
            os.close(handle)
            raise UserError(f"{self.folder}: another conversion writes to it; wait for its end, or name another DST") from error
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


def _start_progress(output: _Output, parts: list[int], tail: int, files: Path, progress: Progress) -> Callable[[int], None]:
    """Check the free disk space. Returns a function that reports progress: it takes the number of bytes just converted.

    tail: number of bytes that are written in addition to the parts. Raises UserError if the disk is too full.
    """
    total, converted = sum(parts) + max(0, tail), 0
    needed = sum(parts) + tail + sum((files / name).stat().st_size for name in copied_files(files))
    free = shutil.disk_usage(output.folder).free
    if needed > free:
        raise UserError(f"{output.target}: needs {needed:,} bytes and {free:,} are free on its disk; free some, or name a DST elsewhere")
    progress(converted, total)

    def count(nbytes: int) -> None:
        nonlocal converted
        converted += nbytes
        progress(converted, total)

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
