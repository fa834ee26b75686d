"""The scheduler's database: tables, migrations, shared statements, and the values that are kept.

The ground of the scheduler: no other folder of it may be imported here, and no wire.
"""
