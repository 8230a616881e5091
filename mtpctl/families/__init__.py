"""What is particular to a model family, as data: sizes, tensor names and shapes, MTP conventions."""
