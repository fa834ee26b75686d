"""vLLM as the engine of a sampler: a child process in an environment of its own.

`child` and `messages` run there and import neither Tinsmith's other packages nor what those need.
All other modules run in the pod, and none of them imports `child` or vLLM.
"""
