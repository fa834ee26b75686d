"""The coordinator's database: tables, migrations, episodes as rows, and the values that are kept.

Imports no other folder of the coordinator.
"""
