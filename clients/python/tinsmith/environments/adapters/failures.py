"""What ends an episode of another library without being an act of the player."""


class EpisodeFailedError(RuntimeError):
    """The library could not play or score the episode, which has no reward then; says why."""
