"""What projects used, and their budgets: totals that pods report, sums of them, limits.

Knows no transport. What is counted and where is decided by the pods that count.
"""
