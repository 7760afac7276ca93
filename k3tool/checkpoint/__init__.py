"""Reading and writing checkpoints as bytes: headers, index, tensors, slices, atomic files. No torch here."""
