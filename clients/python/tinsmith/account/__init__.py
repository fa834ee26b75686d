"""What a project's keys did: sessions, and the trail of management actions."""
