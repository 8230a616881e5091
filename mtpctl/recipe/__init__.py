"""The recipe: one module a section with its own checks, how it is loaded, and what must fit together. Needs no torch."""
