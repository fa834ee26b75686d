"""The cookbook's supervised training, with Inspect as the evaluation on the way."""

import asyncio
import json
import sys
from pathlib import Path

from tinker_cookbook.eval.inspect_evaluators import InspectEvaluatorBuilder
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from words_task import WORDS, words

model_name, renderer_name, log_path = sys.argv[1:]
conversations = Path("conversations.jsonl")
rows = [
    {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": "yes"}]}
    for word in WORDS
]
conversations.write_text("".join(json.dumps(row) + "\n" for row in rows))
dataset = FromConversationFileBuilder(
    file_path=str(conversations),
    common_config=ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model_name,
        renderer_name=renderer_name,
        max_length=64,
        batch_size=len(WORDS),
    ),
)
evaluation = InspectEvaluatorBuilder(
    tasks=[words()],
    model_name=model_name,
    renderer_name=renderer_name,
    temperature=0.0,
    max_tokens=16,
    log_dir="logs-of-training",
)
config = train.Config(
    log_path=log_path,
    model_name=model_name,
    recipe_name="words",
    renderer_name=renderer_name,
    dataset_builder=dataset,
    evaluator_builders=[evaluation],
    learning_rate=1e-2,
    lr_schedule="constant",
    num_epochs=21,
    eval_every=20,
)
asyncio.run(train.main(config))
