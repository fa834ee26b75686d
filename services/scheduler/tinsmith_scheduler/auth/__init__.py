"""API keys of projects, and the audit trail of management actions."""
