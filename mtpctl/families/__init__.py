"""The model families as data: sizes, tensor names and shapes, MTP conventions. Imports nothing of mtpctl but the errors."""
