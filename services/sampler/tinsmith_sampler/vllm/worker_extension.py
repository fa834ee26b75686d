"""What vLLM's workers are taught: to take all weights of a model from files."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class WeightsExtension:
    """Mixed into the worker class of vLLM, once for each device."""

    model_runner: Any

    def load_weights_of(self, directory: str) -> None:
        """Replace the weights of the model by those of a folder of safetensors."""
        self.model_runner.reload_weights(weights_path=directory)
        # An unembedding that is tied to the embedding is in no file, so that vLLM leaves it as it
        # is. On a CPU it multiplies by a packed copy, which would be that of the weights before.
        for module in self.model_runner.get_model().modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)
