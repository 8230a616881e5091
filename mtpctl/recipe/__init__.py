"""The recipe: its models, how it is loaded and checked, its errors. Importable without torch."""
