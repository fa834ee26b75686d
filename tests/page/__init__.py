"""The page in a real browser: every view in every state, with pictures for `docs/page`."""
