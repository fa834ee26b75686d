"""Matrix products and elementwise operations whose bits depend on the operation alone.

The ground of exactness: K is cut into fixed blocks here, and nowhere else.
"""
