"""Worker processes, in which the code of environments runs: a process, the pool, the protocol."""
