"""The coordinator pod: hands episodes to remote agents and keeps what became of them."""
