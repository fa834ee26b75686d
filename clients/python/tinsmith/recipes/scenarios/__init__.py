"""The six scenarios of the OpenTinker paper, by name: a recipe, its data, its model, its settings.

No loop lives here, and no data: a scenario is a line of `table` over a recipe of this package.
"""
