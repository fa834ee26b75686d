"""inspect-ai: what its logs in a folder say, a line for each, by the name of the task."""

import json
import sys
from pathlib import Path

from inspect_ai.log import read_eval_log

logs = [read_eval_log(str(path)) for path in Path(sys.argv[1]).iterdir()]
for log in sorted(logs, key=lambda log: log.eval.task):
    (score,) = log.results.scores
    print(
        json.dumps(
            {
                "task": log.eval.task,
                "status": log.status,
                "num_samples": log.results.completed_samples,
                "errors": [str(sample.error) for sample in log.samples if sample.error],
                "metrics": {name: metric.value for name, metric in score.metrics.items()},
                "answers": [
                    [choice.message.text for choice in sample.output.choices]
                    for sample in log.samples
                ],
            }
        )
    )
