"""Placement, memory, buckets: pure arithmetic over names, shapes and sizes, without torch."""
