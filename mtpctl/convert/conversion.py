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
from mtpctl.convert.adapters import MergedReader, adapter_model, require_weights, write_adapter
from mtpctl.convert.hf_folder import HfFolder, check_target, config_to_write, copy_files, files_to_copy, write_config
from mtpctl.convert.hf_writer import (
    DTYPES,
    FP8,
    HfWriter,
    cast_dtypes,
    common_dtype,
    main_dtype,
    make_fp8_layout,
    quantization_config,
    quantize_selected,
    select_fp8_matrices,
)
from mtpctl.convert.model_weights import ModelWeights, Stored, plain_layout, save_layout, with_dtypes
from mtpctl.convert.parts import MARKER, ConversionModel, PartReader, PartWriter, Reader
from mtpctl.convert.source import HF_FOLDER, LAYOUT_FILE, Reference, count_elements, find_checkpoint, find_reference, has_mtp
from mtpctl.convert.tensor_files import FolderWeights
from mtpctl.convert.verification import VerificationResult, verify_adapter, verify_conversion, verify_merged
from mtpctl.errors import UserError
from mtpctl.families.reading import shape_of

TargetFormat = Literal["megatron", "hf"]
Progress = Callable[[int, int], None]
"""Called with the bytes converted so far and in total."""
Report = Callable[[str], None]


@dataclass(frozen=True)
class ConversionOptions:
    """The options of `mtpctl convert-hf`. to: the expected target format, or None; the source determines the actual format."""

    to: TargetFormat | None = None
    dtype: str | None = None
    model: Path | None = None
    verify: bool = False
    force: bool = False
    merge: bool = False


@dataclass(frozen=True)
class ConversionResult:
    """The result of a conversion. tensors: number of tensors in the Hugging Face or PEFT folder."""

    to: TargetFormat
    tensors: int
    nbytes: int
    seconds: float
    verified: VerificationResult | None


_ConversionCounts = tuple[int, int, VerificationResult | None]
"""Numbers of tensors and bytes, and the result of the verification."""


def convert(source: Path, target: Path, options: ConversionOptions, *, report: Report, progress: Progress) -> ConversionResult:
    """Convert `source` to `target`. Raises UserError if it cannot be converted, before `target` is changed."""
    checkpoint = find_checkpoint(source, report)
    target_format: TargetFormat = "megatron" if checkpoint is None else "hf"
    if options.to not in (None, target_format):
        source_kind = "a Hugging Face folder" if checkpoint is None else "a Megatron checkpoint"
        raise UserError(f"--to {options.to}: {source} is {source_kind} already")
    if options.dtype == FP8 and checkpoint is None:
        raise UserError(
            "--dtype fp8: only Hugging Face folders are written in FP8, but SRC becomes a Megatron checkpoint; name a checkpoint or a run"
        )
    adapter = None if checkpoint is None else adapter_of(checkpoint)
    if options.merge and adapter is None:
        raise UserError(f"--merge: {source} contains no adapter")
    if options.dtype and adapter is not None and not options.merge:
        raise UserError("--dtype: an adapter is written in the dtype of its training; remove --dtype, or write the model with --merge")
    check_target(source, target, force=options.force)
    if target.is_symlink():
        target = target.resolve()  # Replaces the folder, not the link to it.
    start = time.perf_counter()
    if checkpoint is None:
        result = _convert_to_megatron(ModelWeights(source), target, options, progress)
    elif adapter is not None and not options.merge:
        result = _convert_to_peft(checkpoint, find_reference(checkpoint, options.model), adapter, target, options, report)
    else:
        result = _convert_to_hf(checkpoint, find_reference(checkpoint, options.model), adapter, target, options, report, progress)
    tensors, nbytes, verified = result
    return ConversionResult(target_format, tensors, nbytes, time.perf_counter() - start, verified)


def _convert_to_megatron(weights: ModelWeights, target: Path, options: ConversionOptions, progress: Progress) -> _ConversionCounts:
    folder, layout = weights.folder, weights.layout
    num_elements = count_elements(folder.shape, mtp=True)
    tensor_dtypes = cast_dtypes({name: weights.dtype(name) for name in weights}, num_elements, DTYPES.get(options.dtype or ""))
    config = config_to_write(folder.config, main_dtype(tensor_dtypes, num_elements), mtp_layers=folder.shape.mtp_layers)
    extras = [stored for stored in layout if not stored.pieces]
    weights.check_aliases()
    weights.check_extras()
    target_model = HfFolder(folder.path, config, shape_of(config))
    with _OutputFolder(target) as output:
        hf = output.folder / HF_FOLDER
        with ConversionModel(target_model, mtp=True) as conversion:
            parameters = conversion.parameters
            dtypes = {name: common_dtype(tensor_dtypes, parameter.hf_names) for name, parameter in parameters.items()}
            writer = PartWriter(output.folder, conversion, dtypes)
            extras_writer = HfWriter(hf, extras, {}, stem="carried", shard_bytes=1 << 62)
            report_converted = _start_progress(output, writer.nbytes, extras_writer.nbytes, folder.path, progress)

            def compute(name: str) -> torch.Tensor:
                value = conversion.to_megatron(name, weights).to(dtypes[name])
                report_converted(value.nbytes)
                return value

            with _background_runner() as run_in_background:
                for index in range(len(writer.parts)):
                    writer.write(index, compute)
                    run_in_background(partial(writer.flush, index))
            hf.mkdir()
            if extras:
                extras_writer.allocate()
                _write_extras(extras_writer, extras, weights.raw)
            copy_files(folder.path, hf)
            write_config(config, hf)
            save_layout(with_dtypes(layout, tensor_dtypes), hf / LAYOUT_FILE)
            writer.finish()
        stored_extras = FolderWeights(hf) if extras else None
        verified = verify_conversion(weights, output.folder, target_model, extra_weights=stored_extras) if options.verify else None
        output.publish()
    return len(layout), sum(writer.nbytes) + extras_writer.nbytes, verified


def _convert_to_hf(
    checkpoint: Path,
    reference: Reference,
    adapter: AdapterRecord | None,
    target: Path,
    options: ConversionOptions,
    report: Report,
    progress: Progress,
) -> _ConversionCounts:
    folder, shape = reference.folder, reference.folder.shape
    mtp = bool(shape.mtp_layers) and (adapter is not None or has_mtp(checkpoint))
    if shape.mtp_layers and not mtp:
        report(f"{checkpoint} was saved without MTP layers; the folder will have none")
    if reference.weights is not None:
        reference.weights.check_extras()
    num_elements = count_elements(shape, mtp=mtp)
    with contextlib.ExitStack() as stack:
        with adapter_model(checkpoint, folder, adapter) if adapter else ConversionModel(folder, mtp=mtp) as conversion:
            reader = (
                MergedReader(checkpoint, conversion, require_weights(checkpoint, reference.weights), adapter)
                if adapter
                else PartReader(checkpoint, conversion)
            )
            fp8_names = select_fp8_matrices(shape, num_elements) if options.dtype == FP8 else frozenset()
            dtype = torch.bfloat16 if fp8_names else DTYPES.get(options.dtype or "")
            tensor_dtypes, layout = _target_dtypes_and_layout(reference, reader, num_elements, dtype)
            config = config_to_write(folder.config, main_dtype(tensor_dtypes, num_elements), mtp_layers=shape.mtp_layers if mtp else 0)
            if fp8_names:
                config["quantization_config"] = quantization_config(shape, fp8_names, layout)
                layout = make_fp8_layout(layout, fp8_names, shape)
            output = stack.enter_context(_OutputFolder(target))
            writer = HfWriter(output.folder, layout, num_elements)
            report_converted = _start_progress(output, reader.nbytes, writer.nbytes - sum(reader.nbytes), folder.path, progress)
            writer.allocate()
            with _background_runner() as run_in_background:
                for index in range(len(reader.parts)):
                    for name, value in reader.read(index).items():
                        for hf_name, tensor in quantize_selected(conversion.to_hf(name, value), fp8_names):
                            writer.put(hf_name, tensor)
                        report_converted(value.nbytes)
                    run_in_background(writer.flush)
            extras = [] if reference.extra_weights is None else [stored for stored in layout if not stored.pieces]
            _write_extras(writer, extras, reference.extra_weights)
            for files_folder in reference.files:
                copy_files(files_folder, output.folder)
            (output.folder / LAYOUT_FILE).unlink(missing_ok=True)
            write_config(config, output.folder)
        verified = None
        if options.verify and adapter is not None:
            base = require_weights(checkpoint, reference.weights)
            verified = verify_merged(
                ModelWeights(output.folder), checkpoint, base, adapter, extra_weights=reference.extra_weights, fp8_names=fp8_names
            )
        elif options.verify:
            verified = verify_conversion(
                ModelWeights(output.folder), checkpoint, folder, extra_weights=reference.extra_weights, fp8_names=fp8_names
            )
        output.publish()
    return len(layout), writer.nbytes, verified


def _convert_to_peft(
    checkpoint: Path, reference: Reference, adapter: AdapterRecord, target: Path, options: ConversionOptions, report: Report
) -> _ConversionCounts:
    if has_mtp(checkpoint):
        report("a PEFT folder cannot contain the trained MTP layers; --merge writes both")
    with _OutputFolder(target) as output:
        weights = require_weights(checkpoint, reference.weights)
        with adapter_model(checkpoint, weights.folder, adapter) as conversion:
            tensors, nbytes = write_adapter(checkpoint, conversion, weights.folder, adapter, output.folder)
        verified = verify_adapter(output.folder, checkpoint, weights, adapter) if options.verify else None
        output.publish()
    return tensors, nbytes, verified


def _target_dtypes_and_layout(
    reference: Reference, reader: Reader, num_elements: dict[str, int], cast_to: torch.dtype | None
) -> tuple[dict[str, torch.dtype], list[Stored]]:
    """The dtypes of the model's tensors, and the layout of the folder to write."""
    saved_dtypes = {
        name: reader.dtypes[parameter.name] for parameter in reader.conversion.parameters.values() for name in parameter.hf_names
    }
    folder_dtypes = {name: stored.dtype for stored in reference.layout or [] for name in stored.pieces if name in num_elements}
    tensor_dtypes = cast_dtypes(
        {name: saved_dtypes[name] for name in num_elements}, num_elements, cast_to, folder_dtypes=folder_dtypes or None
    )
    layout = reference.layout if reference.layout is not None else plain_layout(reference.folder.shape, tensor_dtypes)
    return tensor_dtypes, with_dtypes([stored for stored in layout if all(name in tensor_dtypes for name in stored.pieces)], tensor_dtypes)


def _write_extras(writer: HfWriter, extras: list[Stored], weights: FolderWeights | None) -> None:
    """Write the tensors outside the language model, and close the files."""
    for stored in extras:
        assert weights is not None
        writer.put(stored.name, weights.tensor(stored.name))
    writer.flush()
    writer.close()


class _OutputFolder:
    """The temporary folder `TARGET.partial`, which `publish` renames to the target. It is deleted if the `with` block raises.

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
            remaining_files = list(self.folder.iterdir())
            if (existed or remaining_files) and not (self.folder / MARKER).is_file():
                raise UserError(f"{self.folder}: exists, and was not created by a conversion; remove it or name another DST")
            for path in remaining_files:
                _delete(path)
            (self.folder / MARKER).touch()
        except BaseException:
            os.close(self._lock)
            raise

    def _lock_folder(self) -> int:
        """Open and lock the folder. Raises UserError if another process writes to it, or has just renamed it."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), self.folder.stat()):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError) as error:
            os.close(descriptor)
            raise UserError(f"{self.folder}: another conversion writes to it; wait for its end, or name another DST") from error
        return descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_class: type[BaseException] | None, *_: object) -> None:
        if error_class is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def publish(self) -> None:
        """Rename the complete folder to its target. An existing target is replaced."""
        replaced = self.target.with_name(f".{self.target.name}.replaced-{os.getpid()}")
        if self.target.exists():
            _delete(replaced)
            self.target.rename(replaced)
        self.folder.rename(self.target)
        (self.target / MARKER).unlink()
        _delete(replaced)
        flush(self.target.parent)


def _delete(path: Path) -> None:
    """Delete a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _start_progress(
    output: _OutputFolder, part_bytes: list[int], extra_bytes: int, copied_from: Path, progress: Progress
) -> Callable[[int], None]:
    """Check the free disk space. Returns a function that reports progress, given the number of bytes just converted.

    extra_bytes: number of bytes that are written in addition to the parts; negative if less than the parts is written.

    Raises UserError if the disk is too full.
    """
    total, converted = sum(part_bytes), 0
    needed = sum(part_bytes) + extra_bytes + sum((copied_from / name).stat().st_size for name in files_to_copy(copied_from))
    free = shutil.disk_usage(output.folder).free
    if needed > free:
        raise UserError(f"{output.target}: needs {needed:,} bytes, but its disk has {free:,} free; free some, or name another DST")
    progress(converted, total)

    def add_bytes(nbytes: int) -> None:
        nonlocal converted
        converted += nbytes
        progress(converted, total)

    return add_bytes


@contextlib.contextmanager
def _background_runner() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Yield a function that runs a callable in a thread, one at a time. Errors are raised by the next call or at the end of the block."""
    with ThreadPoolExecutor(1) as pool:
        pending: Future[None] | None = None

        def run_in_background(call: Callable[[], None]) -> None:
            nonlocal pending
            if pending is not None:
                pending.result()
            pending = pool.submit(call)

        yield run_in_background
        if pending is not None:
            pending.result()
