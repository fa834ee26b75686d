"""Who gets which nodes: pure functions over all jobs, pools and nodes of a cluster."""
