"""Traces: what one call causes in every service, as spans of OpenTelemetry."""
