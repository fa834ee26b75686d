"""The cookbook's model for Inspect, made from two paths: one answers, the other one judges."""

import json
import sys

from inspect_ai import eval
from inspect_ai.model import GenerateConfig, Model
from inspect_ai.scorer import model_graded_qa
from tinker_cookbook import model_info
from tinker_cookbook.eval.inspect_utils import InspectAPIFromTinkerSampling
from words_task import WORDS, words_with

model_name, answering_path, judging_path = sys.argv[1:]


def model_of(path: str) -> Model:
    """Return a model whose answers are the likeliest tokens of a checkpoint."""
    api = InspectAPIFromTinkerSampling(
        renderer_name=model_info.get_recommended_renderer_name(model_name),
        model_name=model_name,
        model_path=path,
    )
    return Model(api=api, config=GenerateConfig(max_tokens=16, temperature=0.0))


judge = model_graded_qa(template="{answer}", grade_pattern="(yes)", model=model_of(judging_path))
(log,) = eval(
    words_with(["yes"] * len(WORDS), judge),
    model=model_of(answering_path),
    display="none",
    log_dir="logs-of-judge",
)
print(
    json.dumps(
        {
            "status": log.status,
            "accuracy": log.results.scores[0].metrics["accuracy"].value,
            "judgements": [
                score.explanation for sample in log.samples for score in sample.scores.values()
            ],
        }
    )
)
