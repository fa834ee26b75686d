"""The controller: watches TrainingJobs and TrainerPools and gives them nodes, pods and a status."""
