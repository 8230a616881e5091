"""The recipe: one module for each section and its checks, loading, and the checks over several sections. Needs no torch."""
