"""Readers of megatron-core's checkpoints that run no code from a checkpoint, and report damage in one line."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from mtpctl.checkpoint.stored_metadata import RestrictedUnpickler
from mtpctl.compat import checkpoint_reading
from mtpctl.errors import MtpctlError, UserError


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Read the checkpoint at `path` in the block. Raises a one-line UserError if it cannot be read."""
    checkpoint_reading.install(RestrictedUnpickler)
    try:
        yield
    except CheckpointException as error:
        cause = next((failure[0] for failure in error.failures.values()), error)
        if isinstance(cause, MtpctlError):
            raise cause from error
        raise _unreadable(path, cause) from error
    except torch.OutOfMemoryError:
        raise
    except (OSError, EOFError, pickle.UnpicklingError, RuntimeError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, cause: BaseException) -> UserError:
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [""]
    return UserError(f"{path} cannot be read ({type(cause).__name__}: {lines[0]}); if it is damaged, name another checkpoint")


def reader_of(path: Path) -> FileSystemReader:
    """torch's reader of a checkpoint."""
    checkpoint_reading.install(RestrictedUnpickler)
    return FileSystemReader(path)


def tensors_in(path: Path) -> dict[str, ShardedTensor]:
    """The tensors of a checkpoint by their names, without values."""
    with reading(path):
        tensors: dict[str, ShardedTensor] = dist_checkpointing.load_tensors_metadata(str(path))
    return tensors
