"""Bodies, ids, tensors and answers of the wire: what clients send and take, as native messages."""
