"""Removes files that nothing refers to any more."""

from __future__ import annotations

import asyncio
import logging

from tinsmith_runtime.errors import StorageUnavailableError
from tinsmith_runtime.storage import ObjectStore

logger = logging.getLogger(__name__)

READERS_GRACE_S = 60.0
"""Files that are no longer named stay so long for samplers and downloads of other processes."""


async def discard_folder(store: ObjectStore, folder: str) -> bool:
    """Remove a folder that nothing refers to; return whether it is gone.

    Nothing has to wait for that: while the store is away the folder is left, and goes with its run.
    """
    try:
        await asyncio.to_thread(store.delete_folder, folder)
    except StorageUnavailableError as error:
        logger.warning("folder not removed", extra={"folder": folder, "problem": error.message})
        return False
    return True
