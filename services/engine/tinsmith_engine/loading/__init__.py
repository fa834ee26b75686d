"""From files to a base model in memory: the packed decoder where it fits, else the fallback."""
