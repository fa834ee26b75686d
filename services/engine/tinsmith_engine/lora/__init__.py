"""LoRA products of one layer, for one run or for a group of runs: linear layers and experts."""
