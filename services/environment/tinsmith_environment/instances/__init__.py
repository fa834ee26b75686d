"""Live instances of environments: created once for a request, stepped, expired."""
