"""The page for people: static files, and the JSON and events that they show.

Everything is read from the pods with the key of the reader, so that the page shows no more than the
reader may see. It changes nothing.
"""

from tinsmith_gateway.page.routes import routes

__all__ = ["routes"]
