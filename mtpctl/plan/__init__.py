"""Placement, memory, buckets: pure arithmetic over names, shapes and sizes, without torch."""

from mtpctl.plan.buckets import ALIGNMENT, DTYPE_BYTES, Bucket, Entry, TensorSpec, plan_buckets

__all__ = ["ALIGNMENT", "DTYPE_BYTES", "Bucket", "Entry", "TensorSpec", "plan_buckets"]
