"""What comes of an evaluation: figures by task, answers side by side, a table and a picture.

Nothing here plays; `tinsmith.recipes.evaluate` does, and hands over records.
"""
