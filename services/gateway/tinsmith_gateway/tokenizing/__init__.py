"""Tokenizers and chat templates of models: here for operators' models, confined for strangers'.

What a job's own workers serve was chosen by the job's author. Knows no protocol and no pod.
"""
