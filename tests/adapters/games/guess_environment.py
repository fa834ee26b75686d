"""A class of the user's own for a server of OpenEnv, whose address is a variable."""

import os

from tinsmith.environments.adapters.openenv import OpenEnvEnvironment


class GuessEnvironment(OpenEnvEnvironment):
    """Guess a number."""

    base_url = os.environ["GUESS_URL"]
