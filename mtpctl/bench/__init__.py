"""Measurements. Each module prints what its timer covers, and ends with a verdict against its bounds."""
