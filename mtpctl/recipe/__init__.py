"""The recipe: one module per section with its checks, the loader, and the checks over several sections. Imports no torch."""
