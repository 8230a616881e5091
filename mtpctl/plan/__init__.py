"""Placement, memory and buckets of a run: arithmetic over names, shapes and sizes, without torch."""
