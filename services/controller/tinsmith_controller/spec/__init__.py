"""TrainingJob and TrainerPool as values: specs, status, conditions, names, JSON codecs.

No decision and no cluster: what is here turns resources into dataclasses and back.
"""
