"""Placement, memory, buckets and parameter counts of a run, computed without torch."""
