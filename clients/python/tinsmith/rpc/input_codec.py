"""Prompts and images to and from protobuf messages."""

from __future__ import annotations

from tinsmith import tensors
from tinsmith.types import EncodedTextChunk, ImageChunk, ModelInput
from tinsmith.v1 import trajectories_pb2


def encode_model_input(value: ModelInput) -> trajectories_pb2.ModelInput:
    """Return the message of a prompt."""
    message = trajectories_pb2.ModelInput()
    for chunk in value.chunks:
        if isinstance(chunk, EncodedTextChunk):
            message.chunks.add(tokens=tensors.encode_tokens(chunk.tokens))
        else:
            message.chunks.add(image=encode_image(chunk))
    return message


def decode_model_input(message: trajectories_pb2.ModelInput) -> ModelInput:
    """Return a prompt."""
    return ModelInput(
        tuple(
            EncodedTextChunk(tuple(int(token) for token in tensors.decode_tensor(chunk.tokens)))
            if chunk.WhichOneof("content") == "tokens"
            else decode_image(chunk.image)
            for chunk in message.chunks
        )
    )


def encode_image(image: ImageChunk) -> trajectories_pb2.ImageChunk:
    """Return the message of an image."""
    return trajectories_pb2.ImageChunk(
        data=image.data, format=image.format, expected_tokens=image.expected_tokens
    )


def decode_image(message: trajectories_pb2.ImageChunk) -> ImageChunk:
    """Return an image."""
    expected = message.expected_tokens if message.HasField("expected_tokens") else None
    return ImageChunk(message.data, message.format, expected)
