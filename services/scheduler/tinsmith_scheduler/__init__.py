"""The scheduler pod: keys, sessions, and which worker holds what."""
