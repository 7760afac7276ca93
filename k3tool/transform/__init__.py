"""What may happen to tensors between reading and writing: splitting, joining, regrouping, quantizing."""
