"""Measurements of what users wait for: each module prints what its timer covers, and ends with a verdict against its bounds.
Runs in the process of `mtpctl bench`; may import everything but the command line.
"""
